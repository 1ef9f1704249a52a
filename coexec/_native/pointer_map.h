// Objects by the address of a Python object: for lookups in each torch call, which must make no integer of it.
#pragma once

#include <Python.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace coexec {

// Holds no references; whoever fills it keeps both alive until it is cleared.
template <typename Value>
class PointerMap {
 public:
  PointerMap() : slots_(kSmallest) {}

  size_t size() const { return size_; }

  // What was put in for a key; null if nothing was.
  Value* find(const PyObject* key) const {
    for (size_t i = place_of(key);; i = (i + 1) & (slots_.size() - 1)) {
      if (slots_[i].first == key) return slots_[i].second;
      if (!slots_[i].first) return nullptr;
    }
  }

  // A key must not be put in twice.
  void insert(const PyObject* key, Value* value) {
    if (2 * (size_ + 1) > slots_.size()) grow();
    place(key, value);
    ++size_;
  }

  void clear() {
    if (size_ != 0) slots_.assign(slots_.size(), {});
    size_ = 0;
  }

 private:
  static constexpr size_t kSmallest = 64;  // a power of two, as all sizes

  size_t place_of(const PyObject* key) const {
    auto address = static_cast<uint64_t>(reinterpret_cast<uintptr_t>(key));
    return (address * 0x9E3779B97F4A7C15ull >> 32) & (slots_.size() - 1);
  }

  void place(const PyObject* key, Value* value) {
    size_t i = place_of(key);
    while (slots_[i].first) i = (i + 1) & (slots_.size() - 1);
    slots_[i] = {key, value};
  }

  void grow() {
    std::vector<std::pair<const PyObject*, Value*>> old(2 * slots_.size());
    old.swap(slots_);
    for (const auto& [key, value] : old) {
      if (key) place(key, value);
    }
  }

  std::vector<std::pair<const PyObject*, Value*>> slots_;
  size_t size_ = 0;
};

}  // namespace coexec
