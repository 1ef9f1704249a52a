// When a runner's thread computed and when it waited, while somebody profiles.
#pragma once

#include <atomic>
#include <chrono>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

namespace coexec {

class Spans {
 public:
  using Clock = std::chrono::steady_clock;
  using Span = std::tuple<double, double, bool>;  // begin and end in seconds of the clock, and whether it waited

  // Python's thread.
  void record(bool on) { on_.store(on, std::memory_order_relaxed); }

  // Python's thread: what was recorded since the last time.
  std::vector<Span> take() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(spans_, {});
  }

  // The runner's thread: a span that ends now.
  void add(Clock::time_point begin, bool waited) {
    if (!on_.load(std::memory_order_relaxed)) return;
    double now = seconds(Clock::now());
    std::lock_guard<std::mutex> lock(mutex_);
    spans_.emplace_back(seconds(begin), now, waited);
  }

 private:
  static double seconds(Clock::time_point t) { return std::chrono::duration<double>(t.time_since_epoch()).count(); }

  std::atomic<bool> on_{false};
  std::mutex mutex_;
  std::vector<Span> spans_;
};

}  // namespace coexec
