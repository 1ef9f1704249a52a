#include "shared_work.h"

#include "dispatch_keys.h"
#include "float_control.h"
#include "waiting.h"

#include <optional>
#include <thread>

namespace coexec {

namespace {

constexpr int kPartBits = 16;

uint64_t ticket_of(uint32_t kernel, int parts) {
  return static_cast<uint64_t>(kernel) << (2 * kPartBits) | static_cast<uint64_t>(parts) << kPartBits;
}

int next_of(uint64_t ticket) { return static_cast<uint16_t>(ticket); }

// Of a thread in which nothing has been set.
const at::ThreadLocalState& blank_state() {
  static const at::ThreadLocalState state = [] {
    std::optional<at::ThreadLocalState> captured;
    std::thread([&] { captured.emplace(); }).join();
    return *captured;
  }();
  return state;
}

}  // namespace

bool SharedWork::is_left(uint64_t ticket) { return next_of(ticket) < static_cast<uint16_t>(ticket >> kPartBits); }

void SharedWork::compute(uint64_t ticket) {
  try {
    body_(data_, next_of(ticket));
  } catch (...) {
    std::lock_guard<std::mutex> lock(mutex_);
    error_ = std::current_exception();
  }
  if (left_.fetch_sub(1, std::memory_order_acq_rel) == 1) left_.notify_one();
}

void SharedWork::run(int parts, Body body, void* data) {
  body_ = body;
  data_ = data;
  float_control_ = float_control();
  error_ = nullptr;
  left_.store(parts, std::memory_order_relaxed);
  uint32_t kernel = offered_.load(std::memory_order_relaxed) + 1;
  ticket_.store(ticket_of(kernel, parts), std::memory_order_release);
  offered_.store(kernel, std::memory_order_seq_cst);
  on_offer_();
  while (take([](unsigned int) {})) {}
  look(kLastPart, [this] { return left_.load(std::memory_order_acquire) == 0; });
  while (int left = left_.load(std::memory_order_acquire)) left_.wait(left, std::memory_order_acquire);
  if (error_) std::rethrow_exception(error_);
}

Helping::Helping(unsigned int modes)
    : float_control_(float_control()), blank_(blank_state()), no_grad_(false), below_autograd_(kAutogradAndViews) {
  set_float_control(modes);
}

Helping::~Helping() { set_float_control(float_control_); }

}  // namespace coexec
