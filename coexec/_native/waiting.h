// How the threads of the runners wait for each other.
#pragma once

#include "kept_memory.h"
#include "kernel_threads.h"

#include <pybind11/pybind11.h>

#include <chrono>
#include <condition_variable>
#include <mutex>

#if defined(__SSE__) || defined(_M_X64)
#include <immintrin.h>
#endif

namespace coexec {

// Waking a thread costs more than most waits of a runner's thread are long: it looks for a while before it sleeps.
constexpr std::chrono::microseconds kSpin{100};

// The last part of a kernel is usually done when the others are.
constexpr std::chrono::microseconds kLastPart{30};

// Between two kernels that are shared there are small ones.
constexpr std::chrono::microseconds kBetweenKernels{200};

// Looks whether a condition holds, for a while; returns whether it does.
template <typename Condition>
bool look(std::chrono::microseconds at_most, Condition condition) {
  auto began = std::chrono::steady_clock::now();
  while (!condition()) {
    if (std::chrono::steady_clock::now() - began > at_most) return false;
#if defined(__SSE__) || defined(_M_X64)
    _mm_pause();
#endif
  }
  return true;
}

inline double seconds_since(std::chrono::steady_clock::time_point t) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - t).count();
}

// A runner's thread without work leaves processors and memory to others.
inline void leave_to_others() {
  release_kernel_threads();
  give_idle_memory_back();
}

// A runner's thread waits for work; after a while without any, `idle` is called.
template <typename Condition, typename Idle = void (*)()>
void wait_idly(
    std::condition_variable& changed, std::unique_lock<std::mutex>& lock, Condition condition,
    Idle idle = leave_to_others) {
  if (changed.wait_for(lock, std::chrono::milliseconds(50), condition)) return;
  lock.unlock();
  idle();
  lock.lock();
  changed.wait(lock, condition);
}

// How often a thread of Python that waits looks for signals.
constexpr std::chrono::milliseconds kSignals{50};

// Python's side: waits, without the GIL, until a condition holds; signals (Ctrl-C) are raised.
template <typename Condition>
void wait_in_python(std::condition_variable& changed, std::unique_lock<std::mutex>& lock, Condition condition) {
  if (condition()) return;
  lock.unlock();
  {
    pybind11::gil_scoped_release release;
    while (true) {
      lock.lock();
      bool ready = changed.wait_for(lock, kSignals, condition);
      lock.unlock();
      if (ready) break;
      pybind11::gil_scoped_acquire acquire;
      if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
    }
  }
  lock.lock();
}

}  // namespace coexec
