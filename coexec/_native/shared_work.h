// Kernels that the GraphRunner's thread shares with a thread that waits for it.
//
// Python waits in most of an iteration's time, and its processor has nothing to do then. OpenMP's workers could
// use it, but they keep a processor busy while they wait, which Python or a kernel needs in the next moment. So
// large kernels are cut into parts, and whoever waits for the GraphRunner computes some of them. They are cut the
// same way whether somebody waits or not: results do not depend on timing.
#pragma once

#include "kernel_threads.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <utility>

namespace coexec {

// One kernel at a time, which the GraphRunner's thread offers to others.
class SharedWork {
 public:
  using Body = void (*)(void* data, int part);

  // `on_offer` is called after `offered` has changed.
  explicit SharedWork(std::function<void()> on_offer) : on_offer_(std::move(on_offer)) {}

  // Computes a kernel's parts: the calling thread, and each one that helps, takes the next one that is left. What
  // a part throws is thrown when all are done.
  void run(int parts, Body body, void* data);

  // Changes with each kernel that is offered.
  uint32_t offered() const { return offered_.load(std::memory_order_seq_cst); }

  // Computes the next part that is left; returns whether there was one. `prepare` is called before, with the
  // kernel's rounding modes.
  template <typename Prepare>
  bool take(Prepare prepare) {
    uint64_t next = ticket_.load(std::memory_order_acquire);
    while (is_left(next)) {
      // Who has got a part may read the kernel: it is not over before the part is done.
      if (!ticket_.compare_exchange_weak(next, next + 1, std::memory_order_acq_rel)) continue;
      prepare(float_control_);
      compute(next);
      return true;
    }
    return false;
  }

 private:
  static bool is_left(uint64_t ticket);
  void compute(uint64_t ticket);

  std::atomic<uint64_t> ticket_{0};  // the kernel, how many parts it has, and the next of them
  std::atomic<uint32_t> offered_{0};
  std::atomic<int> left_{0};  // parts that are not done
  Body body_ = nullptr;
  void* data_ = nullptr;
  unsigned int float_control_ = 0;
  std::function<void()> on_offer_;
  std::mutex mutex_;
  std::exception_ptr error_;
};

// What a thread of Python is while it computes parts: one of the GraphRunner's, without the modes and settings that
// are in force where it waits.
class Helping {
 public:
  explicit Helping(unsigned int float_control);
  ~Helping();
  Helping(const Helping&) = delete;
  Helping& operator=(const Helping&) = delete;

 private:
  unsigned int float_control_;
  at::ThreadLocalStateGuard blank_;
  at::AutoGradMode no_grad_;
  c10::impl::ExcludeDispatchKeyGuard below_autograd_;
  OneKernelThread one_;
};

}  // namespace coexec
