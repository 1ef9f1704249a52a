// Placeholders and records of an iteration that nobody needs any more, for a later iteration.
#pragma once

#include "meta.h"
#include "slots.h"

#include <pybind11/pybind11.h>

#include <vector>

namespace coexec {

// The slots of a Symbol and of an EventRecord.
struct SymbolSlots {
  Slot tensor, binding, meta, history;
};

struct RecordSlots {
  Slot node, key, ambient, tokens, numbers, location, exposure;
};

// A placeholder, and what it was when it was made.
struct Placeholder {
  pybind11::object symbol;
  pybind11::object id;  // of the tensor, as Python's dictionaries have it
  c10::DispatchKeySet keys;
  size_t bytes = 0;
};

// What an iteration has made, and for which node. Whoever holds it keeps it from being used again.
struct Made {
  struct OfOutput {
    size_t node, output;
    Placeholder placeholder;
  };
  struct OfCall {
    size_t node;
    pybind11::object record;
  };
  std::vector<OfOutput> placeholders;
  std::vector<OfCall> records;
};

// What earlier iterations have left for one node. There may be two of them, where one ends after the next has begun.
class Left {
 public:
  explicit Left(size_t outputs) : placeholders_(outputs) {}

  // One, which gets these sizes, or none. All slots of its symbol but that of the tensor are to be set.
  Placeholder placeholder(size_t output, const SymbolSlots& slots, at::IntArrayRef shape, at::IntArrayRef stride,
                          int64_t offset);
  // One whose slots are to be set, or none.
  pybind11::object record();

  // Takes what nobody refers to, and what nobody has changed: the next iteration must not see what was hung on it.
  void take(Placeholder placeholder, size_t output, const SymbolSlots& slots, const Meta& meta);
  void take(pybind11::object record, const RecordSlots& slots, PyObject* produced);

 private:
  static constexpr size_t kMost = 2;

  std::vector<std::vector<Placeholder>> placeholders_;  // by output
  std::vector<pybind11::object> records_;
};

// A new placeholder, whose symbol has no slot set but that of the tensor.
Placeholder make_placeholder(const Meta& meta, PyObject* symbol_class, const SymbolSlots& slots, at::IntArrayRef shape,
                             at::IntArrayRef stride, int64_t offset);

// A tuple of these items: `before`, if that is one.
pybind11::object tuple_of(const std::vector<PyObject*>& items, PyObject* before);

}  // namespace coexec
