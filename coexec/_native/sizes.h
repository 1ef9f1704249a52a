// Sizes that vary from iteration to iteration; see coexec.tracegraph.sizes.
#pragma once

#include <c10/util/ArrayRef.h>
#include <pybind11/pybind11.h>

#include <functional>
#include <optional>
#include <vector>

namespace coexec {

// A number, a symbol, or (sum of coefficient * product of factors + constant) // divisor.
struct Size {
  struct Term;

  int64_t constant = 0, divisor = 1;
  int64_t symbol = -1;
  bool exact = false;  // the division leaves no remainder
  std::vector<Term> terms;

  bool varies() const { return symbol >= 0 || !terms.empty(); }

  // The value; nothing if a symbol has none yet, or an exact division is none.
  std::optional<int64_t> value(const std::function<std::optional<int64_t>(int64_t)>& symbols) const;
};

struct Size::Term {
  int64_t coefficient;
  std::vector<Size> factors;
};

// From what coexec.runners.sizes.encoded made.
Size size_of(const pybind11::handle& encoded);
std::vector<Size> sizes_of(const pybind11::handle& list);

bool vary(const std::vector<Size>& sizes);

// The values of sizes; nothing if one has none.
std::optional<std::vector<int64_t>> values_of(
    const std::vector<Size>& sizes, const std::function<std::optional<int64_t>(int64_t)>& symbols);

// Whether sizes have these values.
bool are(
    const std::vector<Size>& sizes, c10::IntArrayRef values,
    const std::function<std::optional<int64_t>(int64_t)>& symbols);

}  // namespace coexec
