#include "draws.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <ATen/Utils.h>
#include <ATen/core/MT19937RNGEngine.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <mutex>

// Compiled for several processors, of which the one that runs it chooses.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define COEXEC_VECTORIZED __attribute__((optimize("O3"), target_clones("avx512f", "avx2", "default")))
#else
#define COEXEC_VECTORIZED
#endif

namespace coexec {
namespace {

constexpr int kState = at::MERSENNE_STATE_N, kMiddle = at::MERSENNE_STATE_M;
constexpr int kPairs = 1024;  // drawn at a time
constexpr int kBits = 53;     // of a double that is drawn

inline uint32_t twisted(uint32_t u, uint32_t v) {
  uint32_t mixed = (u & at::UMASK) | (v & at::LMASK);
  return (mixed >> 1) ^ (-(v & 1) & at::MATRIX_A);
}

// The next 624 numbers of the Mersenne Twister (Matsumoto and Nishimura 1998, section 2.1).
COEXEC_VECTORIZED void next_state(uint32_t* state) {
  for (int i = 0; i < kState - kMiddle; ++i) state[i] = state[i + kMiddle] ^ twisted(state[i], state[i + 1]);
  for (int i = kState - kMiddle; i < kState - 1; ++i) {
    state[i] = state[i + kMiddle - kState] ^ twisted(state[i], state[i + 1]);
  }
  state[kState - 1] = state[kMiddle - 1] ^ twisted(state[kState - 1], state[0]);
}

COEXEC_VECTORIZED void temper(const uint32_t* state, uint32_t* out, int count) {
  for (int i = 0; i < count; ++i) {
    uint32_t y = state[i];
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680;
    y ^= (y << 15) & 0xefc60000;
    out[i] = y ^ (y >> 18);
  }
}

// As often as the generator would be called.
void draw(at::mt19937_data_pod& data, uint32_t* out, int count) {
  while (count > 0) {
    if (data.left_ == 1) {
      next_state(data.state_.data());
      data.left_ = kState + 1;
      data.next_ = 0;
    }
    int taken = std::min(count, data.left_ - 1);
    temper(data.state_.data() + data.next_, out, taken);
    data.next_ += taken;
    data.left_ -= taken;
    out += taken;
    count -= taken;
  }
}

// A number in [0, 1) is the lower bits of a pair, and below p if these are below p with as many bits.
template <typename T>
COEXEC_VECTORIZED void compare(const uint32_t* words, T* out, int64_t count, uint64_t below) {
  constexpr uint64_t mask = (uint64_t{1} << kBits) - 1;
  for (int64_t i = 0; i < count; ++i) {
    uint64_t bits = ((static_cast<uint64_t>(words[2 * i]) << 32) | words[2 * i + 1]) & mask;
    out[i] = static_cast<T>(bits < below);
  }
}

template <typename T>
void fill(at::Tensor& tensor, double p, at::CPUGeneratorImpl& generator) {
  std::lock_guard<std::mutex> lock(generator.mutex_);
  at::mt19937 engine = generator.engine();
  at::mt19937_data_pod data = engine.data();
  auto below = static_cast<uint64_t>(std::ceil(std::ldexp(p, kBits)));
  std::array<uint32_t, 2 * kPairs> words;
  T* out = tensor.mutable_data_ptr<T>();
  for (int64_t left = tensor.numel(); left > 0;) {
    int64_t count = std::min<int64_t>(left, kPairs);
    draw(data, words.data(), static_cast<int>(2 * count));
    compare(words.data(), out, count, below);
    out += count;
    left -= count;
  }
  engine.set_data(data);
  generator.set_engine(engine);
}

// Whether it was one of the tensors that can be filled here: PyTorch fills dense ones in the order of memory, too.
bool draw_here(at::Tensor& tensor, double p, at::CPUGeneratorImpl& generator) {
  if (!(p >= 0 && p <= 1) || !tensor.is_cpu() || !tensor.is_non_overlapping_and_dense()) return false;
  if (tensor.scalar_type() == at::kFloat) {
    fill<float>(tensor, p, generator);
  } else if (tensor.scalar_type() == at::kDouble) {
    fill<double>(tensor, p, generator);
  } else {
    return false;
  }
  return true;
}

// PyTorch can be built with another generator for this: numbers and states are compared once.
bool is_the_same() {
  auto theirs = at::make_generator<at::CPUGeneratorImpl>(1), own = at::make_generator<at::CPUGeneratorImpl>(1);
  at::Tensor numbers = at::empty({1000}, at::kFloat).bernoulli_(0.3, theirs);
  at::Tensor own_numbers = at::empty({1000}, at::kFloat);
  draw_here(own_numbers, 0.3, *at::check_generator<at::CPUGeneratorImpl>(own));
  return numbers.equal(own_numbers) && theirs.get_state().equal(own.get_state());
}

}  // namespace

void draw_bernoulli(at::Tensor tensor, double p) {
  static const bool same = is_the_same();
  auto* generator = at::get_generator_or_default<at::CPUGeneratorImpl>(
      std::nullopt, at::detail::getDefaultCPUGenerator());
  if (!same || !draw_here(tensor, p, *generator)) tensor.bernoulli_(p);
}

}  // namespace coexec
