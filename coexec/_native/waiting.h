// How the threads of the runners wait for each other.
#pragma once

#include "kernel_threads.h"

#include <pybind11/pybind11.h>

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace coexec {

// Waking a thread costs more than most waits of a runner's thread are long: it looks for a while before it sleeps.
constexpr std::chrono::microseconds kSpin{100};

inline double seconds_since(std::chrono::steady_clock::time_point t) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - t).count();
}

// A runner's thread waits for work; after a while without any, it leaves the processors to others: `idle` is called.
template <typename Condition, typename Idle = void (*)()>
void wait_idly(
    std::condition_variable& changed, std::unique_lock<std::mutex>& lock, Condition condition,
    Idle idle = release_kernel_threads) {
  if (changed.wait_for(lock, std::chrono::milliseconds(50), condition)) return;
  lock.unlock();
  idle();
  lock.lock();
  changed.wait(lock, condition);
}

// Python's side: waits, without the GIL, until a condition holds; signals (Ctrl-C) are raised.
template <typename Condition>
void wait_in_python(std::condition_variable& changed, std::unique_lock<std::mutex>& lock, Condition condition) {
  if (condition()) return;
  lock.unlock();
  {
    pybind11::gil_scoped_release release;
    while (true) {
      lock.lock();
      bool ready = changed.wait_for(lock, std::chrono::milliseconds(50), condition);
      lock.unlock();
      if (ready) break;
      pybind11::gil_scoped_acquire acquire;
      if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
    }
  }
  lock.lock();
}

}  // namespace coexec
