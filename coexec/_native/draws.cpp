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

// A double in [0, 1) is the lower bits of a pair of words.
inline uint64_t bits_of(const uint32_t* pair) {
  constexpr uint64_t mask = (uint64_t{1} << kBits) - 1;
  return ((static_cast<uint64_t>(pair[0]) << 32) | pair[1]) & mask;
}

// It is below p if its bits are below p with as many bits.
template <typename T>
COEXEC_VECTORIZED void compare(const uint32_t* words, T* out, int64_t count, uint64_t below) {
  for (int64_t i = 0; i < count; ++i) out[i] = static_cast<T>(bits_of(words + 2 * i) < below);
}

// A float in [0, 1) is the lower bits of a word.
COEXEC_VECTORIZED void convert(const uint32_t* words, float* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = static_cast<float>(static_cast<int32_t>(words[i] & 0xffffff)) * 0x1p-24f;
}

COEXEC_VECTORIZED void convert(const uint32_t* words, double* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    out[i] = static_cast<double>(static_cast<int64_t>(bits_of(words + 2 * i))) * 0x1p-53;
  }
}

// Fills memory with what `make` makes of each `words_each` words that the generator gives.
template <typename T, typename Make>
void fill(at::Tensor& tensor, int words_each, at::CPUGeneratorImpl& generator, Make make) {
  std::lock_guard<std::mutex> lock(generator.mutex_);
  at::mt19937 engine = generator.engine();
  at::mt19937_data_pod data = engine.data();
  std::array<uint32_t, 2 * kPairs> words;
  T* out = tensor.mutable_data_ptr<T>();
  for (int64_t left = tensor.numel(); left > 0;) {
    int64_t count = std::min<int64_t>(left, kPairs);
    draw(data, words.data(), static_cast<int>(words_each * count));
    make(words.data(), out, count);
    out += count;
    left -= count;
  }
  engine.set_data(data);
  generator.set_engine(engine);
}

// Fills a tensor, if it is one that can be filled here; returns whether it was. PyTorch fills dense ones in the
// order of memory, too.
template <typename Make>
bool fill_here(at::Tensor& tensor, int words_of_float, at::CPUGeneratorImpl& generator, Make make) {
  if (!tensor.is_cpu() || !tensor.is_non_overlapping_and_dense()) return false;
  if (tensor.scalar_type() == at::kFloat) {
    fill<float>(tensor, words_of_float, generator, make);
  } else if (tensor.scalar_type() == at::kDouble) {
    fill<double>(tensor, 2, generator, make);
  } else {
    return false;
  }
  return true;
}

bool bernoulli_here(at::Tensor& tensor, double p, at::CPUGeneratorImpl& generator) {
  if (!(p >= 0 && p <= 1)) return false;
  auto below = static_cast<uint64_t>(std::ceil(std::ldexp(p, kBits)));
  auto make = [below](const uint32_t* words, auto* out, int64_t count) { compare(words, out, count, below); };
  return fill_here(tensor, 2, generator, make);
}

bool uniform_here(at::Tensor& tensor, at::CPUGeneratorImpl& generator) {
  auto make = [](const uint32_t* words, auto* out, int64_t count) { convert(words, out, count); };
  return fill_here(tensor, 1, generator, make);
}

// PyTorch can be built with another generator: numbers and states are compared once.
template <typename Theirs, typename Here>
bool is_the_same(Theirs theirs, Here here) {
  auto first = at::make_generator<at::CPUGeneratorImpl>(1), second = at::make_generator<at::CPUGeneratorImpl>(1);
  at::Tensor expected = at::empty({1000}, at::kFloat), own = at::empty({1000}, at::kFloat);
  theirs(expected, first);
  here(own, *at::check_generator<at::CPUGeneratorImpl>(second));
  return expected.equal(own) && first.get_state().equal(second.get_state());
}

at::CPUGeneratorImpl& default_generator() {
  return *at::get_generator_or_default<at::CPUGeneratorImpl>(std::nullopt, at::detail::getDefaultCPUGenerator());
}

}  // namespace

void draw_bernoulli(at::Tensor tensor, double p) {
  static const bool same = is_the_same(
      [](at::Tensor& t, const at::Generator& g) { t.bernoulli_(0.3, g); },
      [](at::Tensor& t, at::CPUGeneratorImpl& g) { bernoulli_here(t, 0.3, g); });
  if (!same || !bernoulli_here(tensor, p, default_generator())) tensor.bernoulli_(p);
}

void draw_uniform(at::Tensor tensor) {
  static const bool same = is_the_same(
      [](at::Tensor& t, const at::Generator& g) { t.uniform_(0, 1, g); },
      [](at::Tensor& t, at::CPUGeneratorImpl& g) { uniform_here(t, g); });
  if (!same || !uniform_here(tensor, default_generator())) tensor.uniform_(0, 1);
}

}  // namespace coexec
