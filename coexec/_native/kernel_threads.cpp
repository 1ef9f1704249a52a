#include "kernel_threads.h"

#include <string>

#if defined(__linux__)
#include <dlfcn.h>

// Of OpenMP 5.0; found in the runtime that PyTorch has loaded, if it has it.
extern "C" int omp_pause_resource_all(int kind) __attribute__((weak));
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

#else

void release_kernel_threads() {}

#endif

}  // namespace coexec
