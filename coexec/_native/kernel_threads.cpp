#include "kernel_threads.h"

#include <string>

#if defined(__linux__)
#include <dlfcn.h>

// Found in the runtimes that PyTorch has loaded, if it has them; the first one is of OpenMP 5.0.
extern "C" {
int omp_pause_resource_all(int kind) __attribute__((weak));
void omp_set_num_threads(int threads) __attribute__((weak));
int omp_get_num_procs(void) __attribute__((weak));
int omp_get_max_threads(void) __attribute__((weak));
int MKL_Set_Num_Threads_Local(int threads) __attribute__((weak));
void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags) __attribute__((weak));
}
#endif

namespace coexec {

#if defined(__linux__)

namespace {

constexpr int kSoft = 1;  // settings are kept

bool is_gnu() {
  Dl_info info;
  if (!omp_pause_resource_all || !dladdr(reinterpret_cast<void*>(&omp_pause_resource_all), &info)) return false;
  return info.dli_fname && std::string(info.dli_fname).find("libgomp") != std::string::npos;
}

}  // namespace

void release_kernel_threads() {
  static const bool gnu = is_gnu();  // others would end the workers of all threads
  if (gnu) omp_pause_resource_all(kSoft);
}

PassiveWorkers::PassiveWorkers() {
  static const bool gnu = is_gnu() && omp_get_num_procs && GOMP_parallel;
  if (gnu) thread_ = std::thread([this] { hold(); });
}

PassiveWorkers::~PassiveWorkers() {
  if (!thread_.joinable()) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void PassiveWorkers::hold() {
  GOMP_parallel([](void*) {}, nullptr, static_cast<unsigned>(omp_get_num_procs()) + 1, 0);
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return stop_; });
}

void limit_kernel_threads(int threads) {
  if (omp_set_num_threads) omp_set_num_threads(threads);
  if (MKL_Set_Num_Threads_Local) MKL_Set_Num_Threads_Local(threads);
}

OneKernelThread::OneKernelThread()
    : threads_(omp_get_max_threads ? omp_get_max_threads() : 1),
      mkl_threads_(MKL_Set_Num_Threads_Local ? MKL_Set_Num_Threads_Local(1) : 1) {
  if (omp_set_num_threads) omp_set_num_threads(1);
}

OneKernelThread::~OneKernelThread() {
  if (omp_set_num_threads) omp_set_num_threads(threads_);
  if (MKL_Set_Num_Threads_Local) MKL_Set_Num_Threads_Local(mkl_threads_);
}

#else

void release_kernel_threads() {}

PassiveWorkers::PassiveWorkers() {}

PassiveWorkers::~PassiveWorkers() {}

void PassiveWorkers::hold() {}

void limit_kernel_threads(int) {}

OneKernelThread::OneKernelThread() : threads_(1), mkl_threads_(1) {}

OneKernelThread::~OneKernelThread() {}

#endif

}  // namespace coexec
