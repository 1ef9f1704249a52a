#include "kernel_threads.h"

#include <string>

#if defined(__linux__)
#include <dlfcn.h>

// Found in the runtimes that PyTorch has loaded, if it has them; the first one is of OpenMP 5.0.
extern "C" {
int omp_pause_resource_all(int kind) __attribute__((weak));
void omp_set_num_threads(int threads) __attribute__((weak));
int MKL_Set_Num_Threads_Local(int threads) __attribute__((weak));
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

void limit_kernel_threads(int threads) {
  if (omp_set_num_threads) omp_set_num_threads(threads);
  if (MKL_Set_Num_Threads_Local) MKL_Set_Num_Threads_Local(threads);
}

#else

void release_kernel_threads() {}

void limit_kernel_threads(int) {}

#endif

}  // namespace coexec
