#include "walker.h"

#include "ambient.h"
#include "float_control.h"
#include "calls.h"
#include "entry.h"
#include "gradients.h"
#include "layout.h"
#include "location.h"
#include "meta.h"
#include "pointer_map.h"
#include "recycled.h"
#include "runner.h"
#include "slots.h"
#include "waiting.h"

#include <ATen/Functions.h>
#include <c10/util/SmallVector.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <unordered_map>
#include <unordered_set>

namespace py = pybind11;

namespace coexec {
namespace {

struct NumberPlan {
  size_t slot;
  std::string transform;
  bool late;
};

struct FeedPlan {
  size_t argument;
  bool late;
  bool itself;  // its memory is written, or seen through a result: a copy would not do
};

// A leaf that a backward pass reaches: at most one of these says where it comes from.
struct Leaf {
  int64_t captured = -1;
  py::object fed, produced;
};

struct Alternative {
  std::vector<py::object> bindings;  // interned
  std::vector<bool> fed_here;        // of each: whether an external tensor is first used as this argument
  std::vector<Leaf> leaves;          // of the implicit arguments: a leaf and its gradient, by turns
  std::vector<FeedPlan> feeds;
  std::optional<std::vector<int64_t>> path;  // the steps before it, where they matter
  py::object step;
  int64_t after = -1;  // a step that has to be on the path, if there is one
  int64_t select = -1;
};

// Objects of Python that the walker makes and reads.
struct WalkerNames {
  Names calls;
  py::object symbol, record, grad_record, produced;
  py::dict treatments;                                              // of functions that are no events
  Slot at, checked, exposed, inputs;                                // of an Iteration
  SymbolSlots of_symbol;
  RecordSlots of_record;
  Slot requires_grad, is_leaf;                                      // of a TensorMeta
  Slot leaf, value;                                                 // of a GradRecord
  Slot event, output;                                               // of a Produced
};

// The state around calls as Python has it, and whether a node's state (by address) is equal to it.
struct AmbientState {
  py::object state;
  std::unordered_map<PyObject*, bool> matches;
};

// So many are kept: a program goes to and fro between a few.
constexpr size_t kMostAmbients = 16;

// Where an iteration begins; the number is that of coexec.tracegraph.graph.
constexpr int64_t kStart = -1;

// A symbol that an iteration has not shown; the number is that of coexec.tracegraph.graph.
constexpr int64_t kUnknown = -(int64_t{1} << 62);

// What a fetch of numbers gives Python; the numbers are those of coexec.runners.walker.
enum class Looks : long { Item = 0, List = 1, Bool = 2, Float = 3, Int = 4 };

// What is done with a function that is no event; the numbers are those of coexec.runners.walker.
enum class Treatment : long { Call = 0, Annotate = 1, IsLeaf = 2, GetGrad = 3, SetGrad = 4 };

struct Node {
  int64_t id, location;
  py::object node, function, key, ambient;
  std::vector<Meta> metas;
  std::vector<NumberSlot> numbers;
  std::vector<NumberPlan> number_plans;
  std::vector<Alternative> alternatives;
  std::vector<std::pair<int64_t, std::vector<int64_t>>> edges;  // messages by the node before
  std::vector<Meta> output_metas;
  bool varies = false;  // whether sizes of its outputs do
  std::vector<Size> watched;  // what it does depends on these
  py::object known;           // the set of their values for which that is known
  std::vector<py::object> output_bindings, output_histories, output_places;
  std::vector<int64_t> plain;  // the register that is an output of no autograd history and on memory of its own, or -1
  std::unordered_map<size_t, size_t> rebinds;  // the argument that an output is, changed in place
  py::object result;
  int64_t returned = -1;  // the output that is the result, if one is
  py::object id_object, location_object;
  std::vector<int64_t> fetches;  // the slots of numbers that Python looks at
  std::vector<std::pair<size_t, size_t>> grads;  // leaf (among the arguments) and output that is its gradient
  Looks looks;                   // what becomes of them; there is one, but for a list
  bool backward;
  bool simple;
};

Leaf make_leaf(const py::handle& binding) {
  Leaf leaf;
  if (py::hasattr(binding, "index")) {
    leaf.captured = binding.attr("index").cast<int64_t>();
  } else if (py::hasattr(binding, "argument")) {
    leaf.fed = py::reinterpret_borrow<py::object>(binding);
  } else {
    leaf.produced = py::reinterpret_borrow<py::object>(binding);
  }
  return leaf;
}

Node make_node(const py::dict& d) {
  Node n;
  n.id = d["id"].cast<int64_t>();
  n.returned = d["returned"].cast<int64_t>();
  n.location = d["location"].cast<int64_t>();
  n.node = d["node"];
  n.function = d["function"];
  n.key = d["key"];
  n.ambient = d["ambient"];
  n.metas = metas_of(d["metas"]);
  for (const auto& slot : d["numbers"].cast<py::list>()) n.numbers.push_back(number_slot(slot.cast<py::dict>()));
  for (const auto& p : d["number_plans"].cast<std::vector<std::tuple<size_t, std::string, bool>>>()) {
    n.number_plans.push_back({std::get<0>(p), std::get<1>(p), std::get<2>(p)});
  }
  for (const auto& a : d["alternatives"].cast<py::list>()) {
    auto alternative = a.cast<py::dict>();
    Alternative out;
    for (const auto& b : alternative["bindings"].cast<py::tuple>()) {
      bool fed = py::hasattr(b, "argument") && b.attr("node").cast<int64_t>() == n.id &&
                 b.attr("argument").cast<size_t>() == out.bindings.size();
      out.fed_here.push_back(fed);
      out.bindings.push_back(py::reinterpret_borrow<py::object>(b));
    }
    for (size_t i = n.metas.size(); i < out.bindings.size(); i += 2) out.leaves.push_back(make_leaf(out.bindings[i]));
    out.path = alternative["path"].cast<std::optional<std::vector<int64_t>>>();
    for (const auto& f : alternative["feeds"].cast<std::vector<std::tuple<size_t, bool, bool>>>()) {
      out.feeds.push_back({std::get<0>(f), std::get<1>(f), std::get<2>(f)});
    }
    out.step = alternative["step"];
    out.after = alternative["after"].cast<int64_t>();
    out.select = alternative["select"].cast<int64_t>();
    n.alternatives.push_back(std::move(out));
  }
  for (auto& edge : d["edges"].cast<std::unordered_map<int64_t, std::vector<int64_t>>>()) n.edges.push_back(edge);
  n.output_metas = metas_of(d["output_metas"]);
  for (const Meta& meta : n.output_metas) n.varies |= meta.varies;
  n.watched = sizes_of(d["watched"]);
  n.known = d["known"];
  n.output_bindings = d["output_bindings"].cast<std::vector<py::object>>();
  n.output_histories = d["output_histories"].cast<std::vector<py::object>>();
  n.plain = d["plain"].cast<std::vector<int64_t>>();
  for (const auto& [output, argument] : d["rebinds"].cast<std::vector<std::pair<size_t, size_t>>>()) {
    n.rebinds[output] = argument;
  }
  n.result = d["result"];
  for (size_t i = 0; i < n.output_bindings.size(); ++i) n.output_places.push_back(py::make_tuple(n.id, i));
  n.id_object = d["id"];
  n.location_object = d["location"];
  n.fetches = d["fetches"].cast<std::vector<int64_t>>();
  n.looks = static_cast<Looks>(d["looks"].cast<long>());
  n.grads = d["grads"].cast<std::vector<std::pair<size_t, size_t>>>();
  n.backward = d["backward"].cast<bool>();
  n.simple = d["simple"].cast<bool>();
  return n;
}

class Walker : public Answering {
 public:
  Walker(const py::list& nodes, const std::unordered_map<int64_t, std::vector<int64_t>>& children, WalkerNames names,
         py::function ambient, std::vector<std::pair<int64_t, int64_t>> ranges)
      : names_(std::move(names)), ambient_(std::move(ambient)), children_(nodes.size() + 1), ranges_(std::move(ranges)) {
    for (const auto& d : nodes) {
      nodes_.push_back(make_node(d.cast<py::dict>()));
      left_.emplace_back(nodes_.back().output_metas.size());
    }
    for (const auto& [node, following] : children) children_.at(node - kStart) = following;
  }

  // Binds the walker to an iteration: Python's dictionaries and lists, and the GraphRunner.
  // With `exclusive`, what is fed is copied unless nobody else can reach its memory.
  // A runner that is `watched` is asked for values by Python only. `check_memory` raises if external tensors
  // share memory as in no trace.
  void begin(py::object iteration, Runner* runner, py::object outermost, bool exclusive, bool watched,
             py::object check_memory) {
    check_memory_ = std::move(check_memory);
    exclusive_ = exclusive;
    watched_ = watched;
    stall_s_ = 0;
    iteration_ = std::move(iteration);
    symbols_ = iteration_.attr("symbols");
    placeholders_ = iteration_.attr("placeholders");
    externals_ = iteration_.attr("externals");
    fed_ = iteration_.attr("fed");
    path_ = iteration_.attr("path");
    records_ = iteration_.attr("records");
    late_ = iteration_.attr("late");
    grads_ = iteration_.attr("grads");
    captured_ = iteration_.attr("captured");
    runner_ = runner;
    outermost_ = std::move(outermost);
    symbol_of_.clear();
    made_ = std::make_shared<Made>();
  }

  // Returns what the iteration has made, for `reuse`.
  std::shared_ptr<Made> end() {
    symbol_of_.clear();
    for (auto* o : {&iteration_, &symbols_, &placeholders_, &externals_, &fed_, &path_, &records_, &late_, &grads_, &captured_,
                    &outermost_, &check_memory_}) {
      *o = py::none();
    }
    runner_ = nullptr;
    return std::exchange(made_, nullptr);
  }

  // What an iteration has made, and does not need any more, may be used by those that begin later.
  void reuse(Made& made) {
    for (auto& [node, output, placeholder] : std::exchange(made.placeholders, {})) {
      left_[node].take(std::move(placeholder), output, names_.of_symbol, nodes_[node].output_metas[output]);
    }
    for (auto& [node, record] : std::exchange(made.records, {})) {
      left_[node].take(std::move(record), names_.of_record, names_.produced.ptr());
    }
  }

  // Has executed locations begin below another frame.
  void locate_below(py::object frame) { outermost_ = std::move(frame); }

  // Seconds that fetches have waited in this iteration.
  double stall_s() const { return stall_s_; }

  // While the iteration before this one is not finished, tensors that the graph does not know yet, and
  // gradients from outside, are left to Python, which knows what has to be waited for.
  void run_ahead(bool ahead) { ahead_ = ahead; }

  // What `p.grad = None` does, for each of these that has a gradient; false if it has done nothing, because
  // one of them is a placeholder.
  bool forget_gradients(const py::list& tensors) {
    std::vector<PyObject*> with_gradient;
    for (py::handle tensor : tensors) {
      if (!THPVariable_Check(tensor.ptr()) || symbol_for(tensor.ptr())) return false;
      PyObject* assigned = lookup(grads_, tensor.ptr());
      bool has = assigned ? PyTuple_GET_ITEM(assigned, 1) != Py_None : THPVariable_Unpack(tensor.ptr()).grad().defined();
      if (has) with_gradient.push_back(tensor.ptr());
    }
    for (PyObject* tensor : with_gradient) forget_gradient(tensor);
    return true;
  }

  // What an optimizer's `_init_group` collects: for each parameter with a gradient, and each list, the item that
  // the list's source names: 0 the parameter, 1 its gradient, none nothing, and else the state of that name. False
  // if nothing was done, because a parameter is a placeholder, or has no such state, or is what the optimizer
  // looks at more closely: a complex one, or one with a gradient that is no strided tensor.
  bool collect(const py::list& parameters, const py::dict& states, const py::list& sources, const py::list& lists) {
    std::vector<py::object> items;  // of each parameter, in the order of the lists
    for (py::handle parameter : parameters) {
      if (!THPVariable_Check(parameter.ptr()) || symbol_for(parameter.ptr())) return false;
      const at::Tensor& tensor = THPVariable_Unpack(parameter.ptr());
      py::object gradient = py::none();
      if (PyObject* assigned = lookup(grads_, parameter.ptr())) {
        gradient = grad_of(PyTuple_GET_ITEM(assigned, 1));
      } else if (tensor.grad().defined()) {
        gradient = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor.grad()));
      }
      if (gradient.is_none()) continue;
      if (tensor.is_complex() || THPVariable_Unpack(gradient.ptr()).layout() != at::kStrided) return false;
      PyObject* state = nullptr;  // borrowed
      for (py::handle source : sources) {
        if (PyUnicode_Check(source.ptr())) {
          if (!state) state = PyDict_GetItemWithError(states.ptr(), parameter.ptr());
          PyObject* value = state && PyDict_Check(state) ? PyDict_GetItemWithError(state, source.ptr()) : nullptr;
          if (PyErr_Occurred()) throw py::error_already_set();
          if (!value) return false;
          items.push_back(py::reinterpret_borrow<py::object>(value));
        } else {
          bool itself = !source.is_none() && PyLong_AsLong(source.ptr()) == 0;
          items.push_back(source.is_none() ? py::none() : itself ? py::reinterpret_borrow<py::object>(parameter) : gradient);
        }
      }
    }
    for (size_t i = 0; i < items.size(); ++i) {
      size_t list = i % sources.size();
      if (sources[list].is_none()) continue;
      if (PyList_Append(lists[list].ptr(), items[i].ptr()) < 0) throw py::error_already_set();
    }
    return true;
  }

  // Gives each of these the gradient that this iteration gave it, which may be a placeholder. Returns those that
  // it gave one, and what they had; none if one of them is a placeholder itself.
  std::optional<std::pair<py::list, py::list>> show_gradients(const py::list& tensors) {
    py::list shown, before;
    for (py::handle tensor : tensors) {
      if (!THPVariable_Check(tensor.ptr()) || symbol_for(tensor.ptr())) return std::nullopt;
    }
    std::unordered_set<PyObject*> seen;
    for (py::handle tensor : tensors) {
      PyObject* assigned = lookup(grads_, tensor.ptr());
      if (!assigned || !seen.insert(tensor.ptr()).second) continue;
      py::object now = grad_of(PyTuple_GET_ITEM(assigned, 1));
      at::Tensor& gradient = THPVariable_Unpack(tensor.ptr()).mutable_grad();
      before.append(py::reinterpret_steal<py::object>(THPVariable_Wrap(gradient)));
      gradient = now.is_none() ? at::Tensor() : THPVariable_Unpack(now.ptr());
      shown.append(tensor);
    }
    return std::make_pair(shown, before);
  }

  // Of the gradients that an iteration has given tensors (its `grads` and `placeholders`): those that become a
  // register as it is, and as a list the others. What Python gets besides, of the places in `held` or as the
  // gradient of something else than a tensor, is among the others for all tensors.
  std::pair<std::shared_ptr<PlainGradients>, py::list> plain_gradients(
      const py::dict& grads, const py::dict& placeholders, const py::set& held, bool announced) {
    std::vector<std::pair<py::handle, py::handle>> all;  // leaf and value
    Py_ssize_t position = 0;
    PyObject *key, *pair;
    while (PyDict_Next(grads.ptr(), &position, &key, &pair)) {
      all.emplace_back(PyTuple_GET_ITEM(pair, 0), PyTuple_GET_ITEM(pair, 1));
    }
    py::set others_too(held);
    for (auto [leaf, value] : all) {
      if (is_produced(value.ptr()) && !THPVariable_Check(leaf.ptr())) {
        others_too.add(place_of(names_.of_symbol.binding.get(symbol_in(placeholders, value.ptr()))));
      }
    }
    auto plain = std::make_shared<PlainGradients>();
    py::list others;
    for (auto [leaf, value] : all) {
      if (is_produced(value.ptr()) && THPVariable_Check(leaf.ptr())) {
        PyObject* symbol = symbol_in(placeholders, value.ptr());
        PyObject* binding = names_.of_symbol.binding.get(symbol);
        int64_t value_register = nodes_.at(event_of(binding)).plain.at(output_of(binding));
        if (value_register >= 0 && !others_too.contains(place_of(binding))) {
          plain->add(leaf, value_register, announced ? names_.of_symbol.tensor.get(symbol) : nullptr);
          continue;
        }
      }
      others.append(py::make_tuple(leaf, value));
    }
    return {std::move(plain), std::move(others)};
  }

  py::object answer(PyObject* function, PyObject* args, PyObject* kwargs) override {
    std::optional<Treatment> treatment = treatment_of(function);
    return treatment ? treat(*treatment, function, args, kwargs) : step(function, args, kwargs);
  }

  bool is_passive(PyObject* function) const override {
    return treatment_of(function) == Treatment::Call;
  }

 private:
  // What is done with a function; none if it is an event.
  std::optional<Treatment> treatment_of(PyObject* function) const {
    PyObject* treatment = PyDict_GetItemWithError(names_.treatments.ptr(), function);
    if (treatment) return static_cast<Treatment>(PyLong_AsLong(treatment));
    if (PyErr_Occurred()) throw py::error_already_set();
    return std::nullopt;
  }

  static py::object checked(PyObject* made) {
    if (!made) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(made);
  }

  static py::object call(PyObject* function, PyObject* args, PyObject* kwargs) {
    return checked(PyObject_Call(function, args, kwargs == Py_None ? nullptr : kwargs));
  }

  py::object treat(Treatment treatment, PyObject* function, PyObject* args, PyObject* kwargs) {
    if (treatment == Treatment::Call) return call(function, args, kwargs);
    if (treatment == Treatment::Annotate) {
      c10::impl::ExcludeDispatchKeyGuard no_modes(c10::python_ks);  // no mode has to see it
      return call(function, args, kwargs);
    }
    py::object not_implemented = py::reinterpret_borrow<py::object>(Py_NotImplemented);
    if (PyTuple_GET_SIZE(args) == 0) return not_implemented;
    PyObject* tensor = PyTuple_GET_ITEM(args, 0);
    PyObject* symbol = symbol_for(tensor);
    if (treatment == Treatment::IsLeaf) return symbol ? not_implemented : call(function, args, kwargs);
    if (treatment == Treatment::GetGrad) {
      if (PyObject* assigned = lookup(grads_, tensor)) return grad_of(PyTuple_GET_ITEM(assigned, 1));
      return symbol ? py::none() : call(function, args, kwargs);
    }
    bool forgets = PyTuple_GET_SIZE(args) == 1 || PyTuple_GET_ITEM(args, 1) == Py_None;
    if (symbol || !forgets) return not_implemented;
    forget_gradient(tensor);
    return py::none();
  }

  void forget_gradient(PyObject* tensor) {
    put(grads_, id_of(tensor), py::reinterpret_steal<py::object>(PyTuple_Pack(2, tensor, Py_None)));
    py::object record = make_instance(names_.grad_record.ptr());
    names_.leaf.set(record.ptr(), tensor);
    names_.value.set(record.ptr(), Py_None);
    if (PyList_Append(records_.ptr(), record.ptr()) < 0) throw py::error_already_set();
  }

  bool is_produced(PyObject* token) const {
    return reinterpret_cast<PyObject*>(Py_TYPE(token)) == names_.produced.ptr();
  }

  size_t event_of(PyObject* produced) const { return PyLong_AsSize_t(names_.event.get(produced)); }
  size_t output_of(PyObject* produced) const { return PyLong_AsSize_t(names_.output.get(produced)); }

  // What an output of an event is known by in Python's dictionaries.
  const py::object& place_of(PyObject* produced) const {
    return nodes_.at(event_of(produced)).output_places.at(output_of(produced));
  }

  // The symbol of an output, in the `placeholders` of an iteration; borrowed.
  PyObject* symbol_in(const py::dict& placeholders, PyObject* produced) const {
    PyObject* symbol = PyDict_GetItemWithError(placeholders.ptr(), place_of(produced).ptr());
    if (!symbol) throw py::key_error("a gradient was produced by no event");
    return symbol;
  }

  // The gradient that a token means.
  py::object grad_of(PyObject* token) const {
    if (!is_produced(token)) return py::reinterpret_borrow<py::object>(token);
    PyObject* symbol = symbol_of(token);
    if (!symbol) throw std::runtime_error("a gradient was produced by no event");
    return py::reinterpret_borrow<py::object>(names_.of_symbol.tensor.get(symbol));
  }

  // Answers an event if it is a simple one; else it has changed nothing, and answers NotImplemented.
  py::object step(PyObject* function, PyObject* args, PyObject* kwargs) {
    py::object not_implemented = py::reinterpret_borrow<py::object>(Py_NotImplemented);
    if (PyList_GET_SIZE(names_.exposed.get(iteration_.ptr())) != 0) return not_implemented;
    int64_t at = PyLong_AsLongLong(names_.at.get(iteration_.ptr()));
    int64_t location = -2;
    for (int64_t child : children_[at - kStart]) {
      const Node& node = nodes_[child];
      if (!node.simple || !equal(node.function.ptr(), function)) continue;
      if (location == -2) location = locate(0, outermost_.ptr());
      if (node.location != location) continue;
      arguments_.tensors.clear();
      arguments_.numbers.clear();
      if (!match_call(args, kwargs, node.key.ptr(), names_.calls, arguments_)) continue;
      if (!fits(node)) continue;
      if (node.backward && (has_hooks() || has_inputs_of_arrays())) return not_implemented;
      for (const Alternative& alternative : node.alternatives) {
        if (!binds(alternative) || !is_on_path(alternative) || !is_behind(alternative)) continue;
        if (!reaches(alternative)) continue;
        if (exclusive_ && feeds_no_copy(alternative)) return not_implemented;
        if (!node.fetches.empty() && (watched_ || !memory_is_checked())) return not_implemented;
        return take(node, alternative, at);
      }
    }
    return not_implemented;
  }

  // Whether what has been fed is on memory that NumPy may know, and write.
  bool has_inputs_of_arrays() const { return PyDict_GET_SIZE(names_.inputs.get(iteration_.ptr())) != 0; }

  bool fits(const Node& node) {
    if (arguments_.tensors.size() != node.metas.size()) return false;
    for (size_t i = 0; i < node.numbers.size(); ++i) {
      if (!node.numbers[i].size.varies() && !number_fits(arguments_.numbers[i], node.numbers[i])) return false;
    }
    if (!same_ambient(node)) return false;
    new_symbols_.clear();
    found_.clear();
    symbolic_.clear();
    for (size_t i = 0; i < node.metas.size(); ++i) {
      PyObject* tensor = arguments_.tensors[i];
      PyObject* symbol = symbol_for(tensor);
      symbolic_.push_back(symbol != nullptr);
      if (symbol) {
        if (!equal(names_.of_symbol.meta.get(symbol), node.metas[i].python.ptr()) &&
            !fits_made(node.metas[i], names_.of_symbol.meta.get(symbol), THPVariable_Unpack(tensor))) {
          return false;
        }
        found_.push_back(py::reinterpret_borrow<py::object>(names_.of_symbol.binding.get(symbol)));
      } else {
        if (!THPVariable_CheckExact(tensor)) return false;
        const at::Tensor& external = THPVariable_Unpack(tensor);
        const Meta& meta = node.metas[i];
        if (!meta.fits_but_for_sizes(external) || !has_sizes(meta, external)) return false;
        if (is_exposed(external)) return false;
        PyObject* known = lookup(externals_, tensor);
        if (ahead_ && !known) return false;
        found_.push_back(known ? py::reinterpret_borrow<py::object>(known) : py::object());
      }
    }
    for (size_t i = 0; i < node.numbers.size(); ++i) {
      if (node.numbers[i].size.varies() && !fits_varying(node.numbers[i].size, arguments_.numbers[i])) return false;
    }
    return (node.watched.empty() || is_known(node)) && (!node.varies || has_shapes(node));
  }

  // --- sizes that vary ---

  std::optional<int64_t> symbol_value(int64_t symbol) const {
    for (const auto& [bound, value] : new_symbols_) {
      if (bound == symbol) return value;
    }
    return runner_->bound(symbol);
  }

  Symbols symbols() const {
    return [this](int64_t symbol) { return symbol_value(symbol); };
  }

  // Whether a size has this value; a symbol without a value gets it.
  bool fits_varying(const Size& size, int64_t value) {
    if (size.symbol >= 0 && !symbol_value(size.symbol)) {
      const auto& [low, high] = ranges_.at(size.symbol);
      if (value < low || value > high) return false;
      new_symbols_.emplace_back(size.symbol, value);
      return true;
    }
    return size.value(symbols()) == value;
  }

  bool fits_varying(const Size& size, PyObject* number) {
    if (!PyLong_CheckExact(number)) return false;
    int overflow = 0;
    int64_t value = PyLong_AsLongLongAndOverflow(number, &overflow);
    return !overflow && fits_varying(size, value);
  }

  // Whether a placeholder is what a node takes, where its sizes are said in other symbols.
  bool fits_made(const Meta& meta, PyObject* made, const at::Tensor& placeholder) {
    return placeholder.scalar_type() == meta.dtype &&
           placeholder.dim() == static_cast<int64_t>(meta.shape.size()) && placeholder.device() == meta.device &&
           (names_.requires_grad.get(made) == Py_True) == meta.requires_grad &&
           (names_.is_leaf.get(made) == Py_True) == meta.is_leaf && has_sizes(meta, placeholder);
  }

  bool has_sizes(const Meta& meta, const at::Tensor& tensor) {
    if (!meta.varies) {
      return tensor.sizes() == at::IntArrayRef(meta.shape) && tensor.strides() == at::IntArrayRef(meta.stride);
    }
    for (int64_t i = 0; i < tensor.dim(); ++i) {
      if (!fits_varying(meta.shape_sizes[i], tensor.sizes()[i])) return false;
    }
    for (int64_t i = 0; i < tensor.dim(); ++i) {
      if (!fits_varying(meta.stride_sizes[i], tensor.strides()[i])) return false;
    }
    return true;
  }

  // Whether a node has been seen, or found, to do what it says for these sizes; if not, Python finds out.
  bool is_known(const Node& node) const {
    py::tuple values(node.watched.size());
    for (size_t i = 0; i < node.watched.size(); ++i) {
      PyObject* value = PyLong_FromLongLong(node.watched[i].value(symbols()).value_or(kUnknown));
      if (!value) throw py::error_already_set();
      PyTuple_SET_ITEM(values.ptr(), i, value);
    }
    int found = PySet_Contains(node.known.ptr(), values.ptr());
    if (found < 0) throw py::error_already_set();
    return found == 1;
  }

  bool has_shapes(const Node& node) const {
    for (const Meta& meta : node.output_metas) {
      if (!values_of(meta.shape_sizes, symbols()) || !values_of(meta.stride_sizes, symbols()) ||
          !meta.offset_size.value(symbols())) {
        return false;
      }
    }
    return true;
  }

  // A placeholder for an output; its symbol says what it looks like, not yet what it is.
  Placeholder make(const Node& node, size_t output) {
    const Meta& meta = node.output_metas[output];
    Placeholder made =
        meta.varies ? make(node, output, *values_of(meta.shape_sizes, symbols()),
                           *values_of(meta.stride_sizes, symbols()), *meta.offset_size.value(symbols()))
                    : make(node, output, meta.shape, meta.stride, meta.offset);
    names_.of_symbol.meta.set(made.symbol.ptr(), meta.python.ptr());
    return made;
  }

  Placeholder make(const Node& node, size_t output, at::IntArrayRef shape, at::IntArrayRef stride, int64_t offset) {
    Placeholder left = left_[node.id].placeholder(output, names_.of_symbol, shape, stride, offset);
    if (left.symbol) return left;
    return make_placeholder(node.output_metas[output], names_.symbol.ptr(), names_.of_symbol, shape, stride, offset);
  }

  static bool feeds_no_copy(const Alternative& alternative) {
    for (const FeedPlan& feed : alternative.feeds) {
      if (feed.itself) return true;
    }
    return false;
  }

  bool same_ambient(const Node& node) {
    if (is_transformed()) return false;
    Ambient now = ambient_fingerprint();
    if (!ambient_now_ || now != ambient_now_->first) {
      auto known = ambients_.find(now);
      if (known == ambients_.end()) {
        AmbientState state{ambient_(1), {}};
        if (ambients_.size() >= kMostAmbients) ambients_.clear();
        known = ambients_.emplace(now, std::move(state)).first;
      }
      ambient_now_ = &*known;
    }
    auto& [state, matches] = ambient_now_->second;
    auto known = matches.find(node.ambient.ptr());
    if (known != matches.end()) return known->second;
    return matches[node.ambient.ptr()] = equal(node.ambient.ptr(), state.ptr());
  }

  bool binds(const Alternative& alternative) {
    for (size_t i = 0; i < found_.size(); ++i) {
      PyObject* expected = alternative.bindings[i].ptr();
      if (found_[i]) {
        if (!equal(found_[i].ptr(), expected)) return false;
      } else if (!alternative.fed_here[i]) {  // it is new in this iteration
        return false;
      }
    }
    return true;
  }

  bool is_on_path(const Alternative& alternative) const {
    if (!alternative.path) return true;
    if (PyList_GET_SIZE(path_.ptr()) != static_cast<Py_ssize_t>(alternative.path->size())) return false;
    for (size_t i = 0; i < alternative.path->size(); ++i) {
      if (PyLong_AsLongLong(PyList_GET_ITEM(path_.ptr(), i)) != (*alternative.path)[i]) return false;
    }
    return true;
  }

  // Whether the step is on the path that the alternative comes after.
  bool is_behind(const Alternative& alternative) const {
    if (alternative.after < 0) return true;
    for (Py_ssize_t i = PyList_GET_SIZE(path_.ptr()) - 1; i >= 0; --i) {
      if (PyLong_AsLongLong(PyList_GET_ITEM(path_.ptr(), i)) == alternative.after) return true;
    }
    return false;
  }

  // Whether a backward pass reaches these leaves, and each has the gradient that it had in the traces. One
  // that comes from outside is left to Python.
  bool reaches(const Alternative& alternative) {
    implicit_.clear();
    for (size_t i = 0; i < alternative.leaves.size(); ++i) {
      const Leaf& leaf = alternative.leaves[i];
      PyObject* tensor = nullptr;  // borrowed
      py::object token;
      if (leaf.captured >= 0) {
        tensor = PyList_GET_ITEM(captured_.ptr(), leaf.captured);
      } else if (leaf.fed) {
        tensor = PyDict_GetItemWithError(fed_.ptr(), leaf.fed.ptr());
      } else if (PyObject* symbol = symbol_of(leaf.produced.ptr())) {
        tensor = names_.of_symbol.tensor.get(symbol);
        token = py::reinterpret_borrow<py::object>(names_.of_symbol.binding.get(symbol));
      }
      if (!tensor || tensor == Py_None) return false;
      if (!token) token = py::reinterpret_borrow<py::object>(tensor);
      PyObject* assigned = lookup(grads_, tensor);
      PyObject* grad = assigned ? PyTuple_GET_ITEM(assigned, 1) : Py_None;
      if (!assigned && token.ptr() == tensor && THPVariable_Unpack(tensor).grad().defined()) return false;
      PyObject* expected = alternative.bindings[alternative.bindings.size() - 2 * (alternative.leaves.size() - i) + 1].ptr();
      if (grad == Py_None ? expected != Py_None : THPVariable_Check(grad) || !equal(grad, expected)) return false;
      implicit_.push_back(std::move(token));
      implicit_.push_back(py::reinterpret_borrow<py::object>(grad));
    }
    return true;
  }

  // Whether a tensor from outside has hooks, which a backward pass would call.
  bool has_hooks() const {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(captured_.ptr()); ++i) {
      if (has_hooks(PyList_GET_ITEM(captured_.ptr(), i))) return true;
    }
    Py_ssize_t position = 0;
    PyObject *key, *tensor;
    while (PyDict_Next(fed_.ptr(), &position, &key, &tensor)) {
      if (has_hooks(tensor)) return true;
    }
    return false;
  }

  static bool has_hooks(PyObject* tensor) {
    if (!THPVariable_Check(tensor)) return false;
    auto* variable = reinterpret_cast<THPVariable*>(tensor);
    auto some = [](PyObject* hooks) { return hooks && hooks != Py_None && PyObject_IsTrue(hooks) == 1; };
    return some(variable->backward_hooks) || some(variable->post_accumulate_grad_hooks);
  }

  // The symbol of an output, borrowed; null if there is none.
  PyObject* symbol_of(PyObject* produced) const {
    PyObject* symbol = PyDict_GetItemWithError(placeholders_.ptr(), place_of(produced).ptr());
    if (!symbol && PyErr_Occurred()) throw py::error_already_set();
    return symbol;
  }

  // The symbol of a placeholder, borrowed; null for another tensor.
  PyObject* symbol_for(PyObject* tensor) const {
    PyObject* symbol = symbol_of_.find(tensor);
    if (symbol || PyDict_GET_SIZE(symbols_.ptr()) == static_cast<Py_ssize_t>(symbol_of_.size())) return symbol;
    return lookup(symbols_, tensor);
  }

  static PyObject* lookup(const py::object& dict, PyObject* tensor) {
    PyObject* value = PyDict_GetItemWithError(dict.ptr(), id_of(tensor).ptr());
    if (!value && PyErr_Occurred()) throw py::error_already_set();
    return value;
  }

  // External tensors share memory only as traces have shown; that is checked when new ones have been fed.
  bool memory_is_checked() const {
    if (PyLong_AsLongLong(names_.checked.get(iteration_.ptr())) == PyDict_GET_SIZE(fed_.ptr())) return true;
    auto checked = py::reinterpret_steal<py::object>(PyObject_CallObject(check_memory_.ptr(), nullptr));
    if (checked) return true;
    if (!PyErr_ExceptionMatches(PyExc_Exception)) throw py::error_already_set();  // Ctrl-C
    PyErr_Clear();  // Python meets it again
    return false;
  }

  py::object take(const Node& node, const Alternative& alternative, int64_t at) {
    for (const auto& [symbol, value] : new_symbols_) runner_->bind(symbol, value);
    send_path(node, alternative, at);
    tokens_.clear();
    for (size_t i = 0; i < found_.size(); ++i) {
      py::handle tensor(arguments_.tensors[i]);
      tokens_.push_back(symbolic_[i] ? found_[i].ptr() : tensor.ptr());
      if (!found_[i] && !lookup(externals_, tensor.ptr())) {
        externals_[id_of(tensor.ptr())] = alternative.bindings[i];
        fed_[alternative.bindings[i]] = tensor;
      }
    }
    for (const py::object& token : implicit_) tokens_.push_back(token.ptr());
    py::object record = make_record(node);
    py::object tokens = py::reinterpret_borrow<py::object>(names_.of_record.tokens.get(record.ptr()));
    send_values(node, alternative);
    py::object before = py::reinterpret_borrow<py::object>(names_.at.get(iteration_.ptr()));
    names_.at.set(iteration_.ptr(), node.id_object.ptr());
    if (PyList_Append(path_.ptr(), alternative.step.ptr()) < 0) throw py::error_already_set();
    py::object fetched;
    if (!node.fetches.empty() && !fetch(node, fetched)) {
      names_.at.set(iteration_.ptr(), before.ptr());
      Py_ssize_t length = PyList_GET_SIZE(path_.ptr());
      if (PyList_SetSlice(path_.ptr(), length - 1, length, nullptr) < 0) throw py::error_already_set();
      return py::reinterpret_borrow<py::object>(Py_NotImplemented);  // Python meets the failure again
    }
    if (PyList_Append(records_.ptr(), record.ptr()) < 0) throw py::error_already_set();
    made_->records.push_back({static_cast<size_t>(node.id), std::move(record)});
    if (!node.fetches.empty()) return fetched;
    c10::SmallVector<py::object, 4> outputs;
    for (size_t i = 0; i < node.output_metas.size(); ++i) {
      py::object symbol, tensor;
      auto rebound = node.rebinds.find(i);
      if (rebound != node.rebinds.end()) {
        tensor = py::reinterpret_borrow<py::object>(arguments_.tensors[rebound->second]);
        symbol = py::reinterpret_borrow<py::object>(symbol_for(tensor.ptr()));
      } else {
        Placeholder placeholder = make(node, i);
        symbol = placeholder.symbol;
        tensor = py::reinterpret_borrow<py::object>(names_.of_symbol.tensor.get(symbol.ptr()));
        put(symbols_, placeholder.id, symbol);
        symbol_of_.insert(tensor.ptr(), symbol.ptr());
        made_->placeholders.push_back({static_cast<size_t>(node.id), i, std::move(placeholder)});
      }
      names_.of_symbol.binding.set(symbol.ptr(), node.output_bindings[i].ptr());
      names_.of_symbol.history.set(symbol.ptr(), node.output_histories[i].ptr());
      put(placeholders_, node.output_places[i], symbol);
      outputs.push_back(std::move(tensor));
    }
    for (const auto& [leaf, output] : node.grads) {
      PyObject* token = PyTuple_GET_ITEM(tokens.ptr(), leaf);
      PyObject* tensor = THPVariable_Check(token) ? token : names_.of_symbol.tensor.get(symbol_of(token));
      put(grads_, id_of(tensor),
          py::reinterpret_steal<py::object>(PyTuple_Pack(2, token, node.output_bindings[output].ptr())));
    }
    if (node.returned >= 0) return outputs[node.returned];
    return build(node.result, outputs, arguments_.tensors, names_.calls);
  }

  void send_path(const Node& node, const Alternative& alternative, int64_t at) {
    for (const auto& [before, messages] : node.edges) {
      if (before != at) continue;
      for (int64_t message : messages) runner_->send(message);
    }
    if (alternative.select >= 0) runner_->send(alternative.select);
  }

  void send_values(const Node& node, const Alternative& alternative) {
    for (const FeedPlan& feed : alternative.feeds) {
      at::Tensor tensor = THPVariable_Unpack(arguments_.tensors[feed.argument]);
      if (!feed.itself && exclusive_ && tensor.storage().use_count() > 1) {
        tensor = copied(tensor);
      }
      if (feed.late) {
        late_.attr("append")(py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor)));
      } else {
        runner_->send(tensor);
      }
    }
    for (const NumberPlan& plan : node.number_plans) {
      c10::IValue number = transformed(arguments_.numbers[plan.slot], plan.transform);
      if (!plan.late) {
        runner_->send(number);
      } else if (number.isInt()) {
        late_.attr("append")(number.toInt());
      } else {
        late_.attr("append")(number.toDouble());
      }
    }
  }

  // What a fetch of numbers returns; false if the graph has failed, or the call will fail.
  bool fetch(const Node& node, py::object& fetched) {
    if (node.looks != Looks::List) return fetch(node.fetches[0], fetched) && convert(node.looks, fetched);
    py::list numbers(node.fetches.size());
    for (size_t i = 0; i < node.fetches.size(); ++i) {
      py::object number;
      if (!fetch(node.fetches[i], number)) return false;
      PyList_SET_ITEM(numbers.ptr(), i, checked(PyNumber_Float(number.ptr())).release().ptr());
    }
    fetched = std::move(numbers);
    return true;
  }

  static bool convert(Looks looks, py::object& number) {
    if (looks == Looks::Bool) {
      number = py::bool_(number);
    } else if (looks == Looks::Float) {
      number = checked(PyNumber_Float(number.ptr()));
    } else if (looks == Looks::Int) {
      if (PyFloat_Check(number.ptr()) && !std::isfinite(PyFloat_AS_DOUBLE(number.ptr()))) return false;
      number = checked(PyNumber_Long(number.ptr()));
    }
    return true;
  }

  // A number that the GraphRunner has computed, as Tensor.item gives it; false if the graph has failed.
  bool fetch(int64_t slot, py::object& number) {
    auto began = std::chrono::steady_clock::now();
    at::Tensor value;
    try {
      value = runner_->fetch(slot).toTensor();
    } catch (const py::error_already_set&) {
      stall_s_ += seconds_since(began);
      throw;  // Ctrl-C
    } catch (const std::exception&) {
      stall_s_ += seconds_since(began);
      return false;
    }
    stall_s_ += seconds_since(began);
    // Not through the mode that looks for operations on placeholders.
    c10::impl::ExcludeDispatchKeyGuard no_modes(c10::python_ks);
    at::Scalar scalar;
    if (value.is_cpu() && value.scalar_type() == at::kFloat && !value.is_neg()) {
      scalar = *value.const_data_ptr<float>();
    } else if (value.is_cpu()) {
      scalar = value.item();
    } else {
      py::gil_scoped_release release;
      scalar = value.item();
    }
    if (scalar.isBoolean()) {
      number = py::bool_(scalar.toBool());
    } else if (scalar.isFloatingPoint()) {
      number = py::float_(scalar.toDouble());
    } else {
      number = py::int_(scalar.toLong());
    }
    return true;
  }

  // The record of a call with `tokens_` and the arguments' numbers.
  py::object make_record(const Node& node) {
    const RecordSlots& slots = names_.of_record;
    py::object record = left_[node.id].record();
    if (!record) {
      record = make_instance(names_.record.ptr());
      slots.node.set(record.ptr(), node.node.ptr());
      slots.key.set(record.ptr(), node.key.ptr());
      slots.ambient.set(record.ptr(), node.ambient.ptr());
      slots.location.set(record.ptr(), node.location_object.ptr());
      slots.exposure.set(record.ptr(), Py_None);
    }
    slots.tokens.set(record.ptr(), tuple_of(tokens_, slots.tokens.get(record.ptr())).ptr());
    slots.numbers.set(record.ptr(), tuple_of(arguments_.numbers, slots.numbers.get(record.ptr())).ptr());
    return record;
  }

  static py::object id_of(PyObject* tensor) {
    return py::reinterpret_steal<py::object>(PyLong_FromVoidPtr(tensor));
  }

  static void put(const py::object& dict, const py::object& key, const py::object& value) {
    if (PyDict_SetItem(dict.ptr(), key.ptr(), value.ptr()) < 0) throw py::error_already_set();
  }

  WalkerNames names_;
  py::function ambient_;
  std::vector<Node> nodes_;
  std::vector<std::vector<int64_t>> children_;  // of the start and of each node
  std::map<Ambient, AmbientState> ambients_;  // those that calls came in
  std::pair<const Ambient, AmbientState>* ambient_now_ = nullptr;  // that of the latest call
  py::object iteration_, symbols_, placeholders_, externals_, fed_, path_, records_, late_, grads_, captured_,
      outermost_, check_memory_;
  Runner* runner_ = nullptr;
  bool exclusive_ = false;
  Arguments arguments_;
  std::vector<py::object> found_;  // the binding of each tensor argument; null for one that is new
  std::vector<py::object> implicit_;  // the leaves and gradients of a backward pass, as a record has them
  std::vector<bool> symbolic_;     // of each tensor argument: whether it is a placeholder
  std::vector<PyObject*> tokens_;  // of a call, borrowed
  PointerMap<PyObject> symbol_of_;  // the symbol of each placeholder that was made here; Python makes others
  std::shared_ptr<Made> made_;
  std::vector<Left> left_;  // of each node
  double stall_s_ = 0;             // in fetches of this iteration
  bool watched_ = false;           // somebody times the fetches
  bool ahead_ = false;             // the iteration before this one is not finished
  std::vector<std::pair<int64_t, int64_t>> ranges_;       // what each symbol in sizes may be
  std::vector<std::pair<int64_t, int64_t>> new_symbols_;  // and what those are that an event binds
};

WalkerNames walker_names_from(const py::dict& d) {
  WalkerNames n;
  n.calls = names_from(d);
  n.symbol = d["Symbol"];
  n.record = d["EventRecord"];
  n.grad_record = d["GradRecord"];
  n.produced = d["Produced"];
  n.treatments = d["treatments"];
  py::object iteration = d["Iteration"];
  n.at = Slot(iteration, "at");
  n.checked = Slot(iteration, "checked");
  n.exposed = Slot(iteration, "exposed");
  n.inputs = Slot(iteration, "inputs");
  n.of_symbol = {Slot(n.symbol, "tensor"), Slot(n.symbol, "binding"), Slot(n.symbol, "meta"),
                 Slot(n.symbol, "history")};
  py::object meta = d["TensorMeta"];
  n.requires_grad = Slot(meta, "requires_grad");
  n.is_leaf = Slot(meta, "is_leaf");
  n.of_record = {Slot(n.record, "node"),    Slot(n.record, "key"),      Slot(n.record, "ambient"), Slot(n.record, "tokens"),
                 Slot(n.record, "numbers"), Slot(n.record, "location"), Slot(n.record, "exposure")};
  n.leaf = Slot(n.grad_record, "leaf");
  n.value = Slot(n.grad_record, "value");
  n.event = Slot(n.produced, "event");
  n.output = Slot(n.produced, "output");
  return n;
}

// The bindings of placeholders that somebody besides their symbols refers to.
py::list held(const py::dict& symbols, const Slot& tensor, const Slot& binding) {
  py::list out;
  Py_ssize_t position = 0;
  PyObject *key, *symbol;
  while (PyDict_Next(symbols.ptr(), &position, &key, &symbol)) {
    if (Py_REFCNT(tensor.get(symbol)) > 1) out.append(py::handle(binding.get(symbol)));
  }
  return out;
}

// Whether these are different single numbers, of types in which steps are counted without error.
bool are_counters(const py::list& tensors) {
  std::unordered_set<PyObject*> seen;
  for (py::handle tensor : tensors) {
    if (!THPVariable_Check(tensor.ptr()) || !seen.insert(tensor.ptr()).second) return false;
    const at::Tensor& counter = THPVariable_Unpack(tensor.ptr());
    bool exact = counter.scalar_type() == at::kFloat || counter.scalar_type() == at::kDouble;
    if (!exact || counter.numel() != 1) return false;
  }
  return true;
}

// Whether no two tensors are on the same memory: of `captured` (or None), those that are `bound`, and all `fed`.
bool have_own_memory(const py::list& captured, const py::tuple& bound, const py::dict& fed) {
  std::vector<c10::StorageImpl*> all;
  all.reserve(bound.size() + fed.size());
  auto add = [&](PyObject* tensor) {
    if (tensor != Py_None) all.push_back(THPVariable_Unpack(tensor).storage().unsafeGetStorageImpl());
  };
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(bound.ptr()); ++i) {
    add(PyList_GET_ITEM(captured.ptr(), PyLong_AsSsize_t(PyTuple_GET_ITEM(bound.ptr(), i))));
  }
  Py_ssize_t position = 0;
  PyObject *key, *tensor;
  while (PyDict_Next(fed.ptr(), &position, &key, &tensor)) add(tensor);
  std::sort(all.begin(), all.end());
  return std::adjacent_find(all.begin(), all.end()) == all.end();
}

}  // namespace

void bind_walker(py::module_& m) {
  py::class_<Made, std::shared_ptr<Made>>(m, "Made");
  py::class_<Walker, Answering>(m, "Walker")
      .def(py::init([](const py::list& nodes, const std::unordered_map<int64_t, std::vector<int64_t>>& children,
                       const py::dict& names, const py::function& ambient,
                       const std::vector<std::pair<int64_t, int64_t>>& ranges) {
        return std::make_unique<Walker>(nodes, children, walker_names_from(names), ambient, ranges);
      }))
      .def("begin", &Walker::begin)
      .def("end", &Walker::end)
      .def("reuse", &Walker::reuse)
      .def("locate_below", &Walker::locate_below)
      .def("run_ahead", &Walker::run_ahead)
      .def("forget_gradients", &Walker::forget_gradients)
      .def("show_gradients", &Walker::show_gradients)
      .def("collect", &Walker::collect)
      .def("plain_gradients", &Walker::plain_gradients)
      .def("stall_s", &Walker::stall_s);
  m.def("held", [](const py::dict& symbols, const py::object& cls) {
    return held(symbols, Slot(cls, "tensor"), Slot(cls, "binding"));
  });
  m.def("have_own_memory", &have_own_memory);
  m.def("are_counters", &are_counters);
  m.def("ambient_fingerprint", &ambient_fingerprint);
  m.def("is_transformed", &is_transformed);
  m.def("float_control", &float_control, "How this thread rounds, and whether it flushes denormal numbers.");
  m.def("set_float_control", &set_float_control);
  m.def("are_nodes_hooked", &are_nodes_hooked);
}

}  // namespace coexec
