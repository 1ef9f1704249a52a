#include "sizes.h"

#include <algorithm>

namespace py = pybind11;

namespace coexec {

std::optional<int64_t> Size::value(const std::function<std::optional<int64_t>(int64_t)>& symbols) const {
  if (symbol >= 0) return symbols(symbol);
  int64_t total = constant;
  for (const Term& term : terms) {
    int64_t product = term.coefficient;
    for (const Size& factor : term.factors) {
      auto value = factor.value(symbols);
      if (!value) return std::nullopt;
      product *= *value;
    }
    total += product;
  }
  int64_t quotient = total / divisor, rest = total % divisor;
  if (rest != 0 && exact) return std::nullopt;
  return rest < 0 ? quotient - 1 : quotient;
}

Size size_of(const py::handle& encoded) {
  Size out;
  if (py::isinstance<py::int_>(encoded)) {
    out.constant = encoded.cast<int64_t>();
    return out;
  }
  auto parts = encoded.cast<py::tuple>();
  if (parts.size() == 1) {
    out.symbol = parts[0].cast<int64_t>();
    return out;
  }
  out.constant = parts[0].cast<int64_t>();
  out.divisor = parts[1].cast<int64_t>();
  out.exact = parts[2].cast<bool>();
  for (const auto& t : parts[3].cast<py::list>()) {
    auto term = t.cast<py::tuple>();
    out.terms.push_back({term[0].cast<int64_t>(), sizes_of(term[1])});
  }
  return out;
}

std::vector<Size> sizes_of(const py::handle& list) {
  std::vector<Size> out;
  for (const auto& s : list.cast<py::list>()) out.push_back(size_of(s));
  return out;
}

bool vary(const std::vector<Size>& sizes) {
  return std::any_of(sizes.begin(), sizes.end(), [](const Size& s) { return s.varies(); });
}

std::optional<std::vector<int64_t>> values_of(
    const std::vector<Size>& sizes, const std::function<std::optional<int64_t>(int64_t)>& symbols) {
  std::vector<int64_t> out;
  out.reserve(sizes.size());
  for (const Size& size : sizes) {
    auto value = size.value(symbols);
    if (!value) return std::nullopt;
    out.push_back(*value);
  }
  return out;
}

bool are(
    const std::vector<Size>& sizes, c10::IntArrayRef values,
    const std::function<std::optional<int64_t>(int64_t)>& symbols) {
  if (sizes.size() != values.size()) return false;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i].varies() ? sizes[i].value(symbols) != values[i] : sizes[i].constant != values[i]) return false;
  }
  return true;
}

}  // namespace coexec
