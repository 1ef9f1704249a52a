#include "walker.h"

#include "ambient.h"
#include "location.h"
#include "meta.h"
#include "queue.h"
#include "runner.h"

#include <ATen/Functions.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/Exceptions.h>

#include <cmath>
#include <unordered_map>

namespace py = pybind11;

namespace coexec {
namespace {

struct NumberSlot {
  double value = 0;
  int64_t integer = 0;
  bool is_float = false;
  bool varies = false;
  uint32_t classes = 0;  // a bit for each class, see class_of
};

// The classes of coexec.tracegraph.calls.number_class as bits of a set.
constexpr double kSpecial[] = {0, 1, -1, 2, -2, 0.5, INFINITY, -INFINITY};
constexpr int kSpecials = 8;

int class_of(double value) {
  if (std::isnan(value)) return kSpecials + 2;
  for (int i = 0; i < kSpecials; ++i) {
    if (value == kSpecial[i]) return i;
  }
  return value > 0 ? kSpecials : kSpecials + 1;
}

struct NumberPlan {
  size_t slot;
  std::string transform;
  bool late;
};

struct FeedPlan {
  size_t argument;
  bool late, written;
};

struct Alternative {
  std::vector<py::object> bindings;  // interned
  std::vector<FeedPlan> feeds;
  int64_t select = -1;
};

struct Node {
  int64_t id, location;
  py::object node, function, key, ambient;
  std::vector<Meta> metas;
  std::vector<NumberSlot> numbers;
  std::vector<NumberPlan> number_plans;
  std::vector<Alternative> alternatives;
  std::unordered_map<int64_t, std::vector<int64_t>> edges;  // messages by the node before
  std::vector<Meta> output_metas;
  std::vector<py::object> output_bindings, output_histories;
  py::object result;
  bool simple;
};

// What a call's arguments hold, in order.
struct Arguments {
  std::vector<PyObject*> tensors, numbers;
};

struct Names {
  PyObject *new_tensor, *same_tensor, *container, *opaque, *tensor;
  py::object symbol, record, index, items, kind, value, binding, meta;
};

bool equal(PyObject* a, PyObject* b) {
  if (a == b) return true;
  if (Py_TYPE(a) != Py_TYPE(b)) return false;
  int r = PyObject_RichCompareBool(a, b, Py_EQ);
  if (r < 0) throw py::error_already_set();
  return r == 1;
}

// Walks a value along the key that `calls.flatten` made of another one.
bool match(PyObject* value, PyObject* key, const Names& names, Arguments& out) {
  if (key == names.tensor) {
    if (!THPVariable_Check(value)) return false;
    out.tensors.push_back(value);
    return true;
  }
  if (PyType_Check(key)) {  // the type of a number
    if (reinterpret_cast<PyObject*>(Py_TYPE(value)) != key) return false;
    out.numbers.push_back(value);
    return true;
  }
  if (reinterpret_cast<PyObject*>(Py_TYPE(key)) == names.opaque) {
    return py::handle(key).attr("value").ptr() == value;
  }
  if (!PyTuple_CheckExact(key)) return !THPVariable_Check(value) && equal(value, key);
  PyObject* kind = PyTuple_GET_ITEM(key, 0);
  PyObject* items = PyTuple_GET_ITEM(key, 1);
  if (reinterpret_cast<PyObject*>(Py_TYPE(value)) != kind) return false;
  if (PyTuple_Check(value) || PyList_Check(value)) {
    Py_ssize_t n = PySequence_Fast_GET_SIZE(value);
    if (PyTuple_GET_SIZE(items) != n) return false;
    for (Py_ssize_t i = 0; i < n; ++i) {
      if (!match(PySequence_Fast_GET_ITEM(value, i), PyTuple_GET_ITEM(items, i), names, out)) return false;
    }
    return true;
  }
  if (PySlice_Check(value)) {
    auto* slice = reinterpret_cast<PySliceObject*>(value);
    return match(slice->start, PyTuple_GET_ITEM(items, 0), names, out) &&
           match(slice->stop, PyTuple_GET_ITEM(items, 1), names, out) &&
           match(slice->step, PyTuple_GET_ITEM(items, 2), names, out);
  }
  return false;  // dictionaries and the like are left to Python
}

bool match_call(PyObject* args, PyObject* kwargs, PyObject* key, const Names& names, Arguments& out) {
  PyObject* positional = PyTuple_GET_ITEM(key, 0);
  PyObject* keywords = PyTuple_GET_ITEM(key, 1);
  Py_ssize_t n = PyTuple_GET_SIZE(args);
  Py_ssize_t named = kwargs && kwargs != Py_None ? PyDict_GET_SIZE(kwargs) : 0;
  if (PyTuple_GET_SIZE(positional) != n || PyTuple_GET_SIZE(keywords) != named) return false;
  for (Py_ssize_t i = 0; i < n; ++i) {
    if (!match(PyTuple_GET_ITEM(args, i), PyTuple_GET_ITEM(positional, i), names, out)) return false;
  }
  if (named == 0) return true;
  Py_ssize_t position = 0, i = 0;
  PyObject *name, *value;
  while (PyDict_Next(kwargs, &position, &name, &value)) {
    PyObject* pair = PyTuple_GET_ITEM(keywords, i++);
    if (!equal(name, PyTuple_GET_ITEM(pair, 0))) return false;
    if (!match(value, PyTuple_GET_ITEM(pair, 1), names, out)) return false;
  }
  return true;
}

bool number_fits(PyObject* number, const NumberSlot& slot) {
  if (PyFloat_CheckExact(number)) {
    double v = PyFloat_AS_DOUBLE(number);
    if (!slot.is_float) return false;
    if (slot.varies) return slot.classes >> class_of(v) & 1;
    return (v == slot.value && std::signbit(v) == std::signbit(slot.value)) ||
           (std::isnan(v) && std::isnan(slot.value));
  }
  if (!PyLong_CheckExact(number) || slot.is_float) return false;
  int overflow = 0;
  int64_t v = PyLong_AsLongLongAndOverflow(number, &overflow);
  if (overflow) return false;
  return slot.varies ? slot.classes >> class_of(static_cast<double>(v)) & 1 : v == slot.integer;
}

NumberSlot number_slot(const py::dict& d) {
  NumberSlot slot;
  slot.is_float = PyFloat_Check(d["value"].ptr());
  slot.value = d["value"].cast<double>();
  if (!slot.is_float) slot.integer = d["value"].cast<int64_t>();
  slot.varies = d["varies"].cast<bool>();
  for (double example : d["examples"].cast<std::vector<double>>()) slot.classes |= 1u << class_of(example);
  return slot;
}

Node make_node(const py::dict& d) {
  Node n;
  n.id = d["id"].cast<int64_t>();
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
    for (const auto& b : alternative["bindings"].cast<py::tuple>()) out.bindings.push_back(py::reinterpret_borrow<py::object>(b));
    for (const auto& f : alternative["feeds"].cast<std::vector<std::tuple<size_t, bool, bool>>>()) {
      out.feeds.push_back({std::get<0>(f), std::get<1>(f), std::get<2>(f)});
    }
    out.select = alternative["select"].cast<int64_t>();
    n.alternatives.push_back(std::move(out));
  }
  n.edges = d["edges"].cast<std::unordered_map<int64_t, std::vector<int64_t>>>();
  n.output_metas = metas_of(d["output_metas"]);
  n.output_bindings = d["output_bindings"].cast<std::vector<py::object>>();
  n.output_histories = d["output_histories"].cast<std::vector<py::object>>();
  n.result = d["result"];
  n.simple = d["simple"].cast<bool>();
  return n;
}

class Walker {
 public:
  Walker(const py::list& nodes, const std::unordered_map<int64_t, std::vector<int64_t>>& children, Names names,
         py::function ambient)
      : names_(std::move(names)), ambient_(std::move(ambient)), children_(children) {
    for (const auto& d : nodes) nodes_.push_back(make_node(d.cast<py::dict>()));
  }

  // Binds the walker to an iteration: Python's dictionaries and lists, and the GraphRunner.
  // With `exclusive`, what is fed is copied unless nobody else can reach its memory.
  void begin(py::object iteration, Runner* runner, py::object outermost, bool exclusive) {
    exclusive_ = exclusive;
    iteration_ = std::move(iteration);
    symbols_ = iteration_.attr("symbols");
    placeholders_ = iteration_.attr("placeholders");
    externals_ = iteration_.attr("externals");
    fed_ = iteration_.attr("fed");
    path_ = iteration_.attr("path");
    records_ = iteration_.attr("records");
    late_ = iteration_.attr("late");
    runner_ = runner;
    outermost_ = std::move(outermost);
  }

  void end() {
    for (auto* o : {&iteration_, &symbols_, &placeholders_, &externals_, &fed_, &path_, &records_, &late_, &outermost_}) {
      *o = py::none();
    }
    runner_ = nullptr;
  }

  py::object step(const py::object& function, const py::tuple& args, const py::object& kwargs) {
    py::object not_implemented = py::reinterpret_borrow<py::object>(Py_NotImplemented);
    auto at = iteration_.attr("at").cast<int64_t>();
    auto found = children_.find(at);
    if (found == children_.end()) return not_implemented;
    int64_t location = -2;
    for (int64_t child : found->second) {
      const Node& node = nodes_[child];
      if (!node.simple || !equal(node.function.ptr(), function.ptr())) continue;
      if (location == -2) location = locate(1, outermost_.ptr());
      if (node.location != location) continue;
      arguments_.tensors.clear();
      arguments_.numbers.clear();
      if (!match_call(args.ptr(), kwargs.ptr(), node.key.ptr(), names_, arguments_)) continue;
      if (!fits(node)) continue;
      for (const Alternative& alternative : node.alternatives) {
        if (!binds(alternative, node)) continue;
        if (exclusive_ && feeds_what_it_writes(alternative)) return not_implemented;
        return take(node, alternative, at);
      }
    }
    return not_implemented;
  }

 private:
  bool fits(const Node& node) {
    if (arguments_.tensors.size() != node.metas.size()) return false;
    for (size_t i = 0; i < node.numbers.size(); ++i) {
      if (!number_fits(arguments_.numbers[i], node.numbers[i])) return false;
    }
    if (!same_ambient(node)) return false;
    found_.clear();
    for (size_t i = 0; i < node.metas.size(); ++i) {
      PyObject* tensor = arguments_.tensors[i];
      PyObject* symbol = lookup(symbols_, tensor);
      if (symbol) {
        py::object meta = py::handle(symbol).attr(names_.meta);
        if (!equal(meta.ptr(), node.metas[i].python.ptr())) return false;
        found_.push_back(py::handle(symbol).attr(names_.binding));
      } else {
        if (!THPVariable_CheckExact(tensor)) return false;
        const at::Tensor& external = THPVariable_Unpack(tensor);
        if (!node.metas[i].fits(external)) return false;
        if (external.is_cpu() && !external.storage().resizable()) return false;  // NumPy may write to it
        PyObject* known = lookup(externals_, tensor);
        found_.push_back(known ? py::reinterpret_borrow<py::object>(known) : py::none());
      }
    }
    return true;
  }

  static bool feeds_what_it_writes(const Alternative& alternative) {
    for (const FeedPlan& feed : alternative.feeds) {
      if (feed.written) return true;
    }
    return false;
  }

  bool same_ambient(const Node& node) {
    if (is_transformed()) return false;
    Ambient now = ambient_fingerprint();
    if (now != fingerprint_ || !ambient_state_) {
      fingerprint_ = now;
      ambient_state_ = ambient_(1);
      ambient_matches_.clear();
    }
    auto known = ambient_matches_.find(node.ambient.ptr());
    if (known != ambient_matches_.end()) return known->second;
    return ambient_matches_[node.ambient.ptr()] = equal(node.ambient.ptr(), ambient_state_.ptr());
  }

  bool binds(const Alternative& alternative, const Node& node) {
    for (size_t i = 0; i < found_.size(); ++i) {
      PyObject* expected = alternative.bindings[i].ptr();
      if (!found_[i].is_none()) {
        if (!equal(found_[i].ptr(), expected)) return false;
      } else if (!is_fed_here(expected, node, i)) {
        return false;
      }
    }
    return true;
  }

  // An external tensor that is new in this iteration fits where the traces first fed one.
  bool is_fed_here(PyObject* binding, const Node& node, size_t argument) {
    if (!PyObject_HasAttrString(binding, "argument")) return false;
    py::handle fed(binding);
    return fed.attr("node").cast<int64_t>() == node.id && fed.attr("argument").cast<size_t>() == argument;
  }

  static PyObject* lookup(const py::object& dict, PyObject* tensor) {
    py::object key = py::reinterpret_steal<py::object>(PyLong_FromVoidPtr(tensor));
    PyObject* value = PyDict_GetItemWithError(dict.ptr(), key.ptr());
    if (!value && PyErr_Occurred()) throw py::error_already_set();
    return value;
  }

  py::object take(const Node& node, const Alternative& alternative, int64_t at) {
    auto edge = node.edges.find(at);
    if (edge != node.edges.end()) {
      for (int64_t message : edge->second) runner_->send(message);
    }
    if (alternative.select >= 0) runner_->send(alternative.select);
    py::list tokens, numbers;
    for (size_t i = 0; i < found_.size(); ++i) {
      py::handle tensor(arguments_.tensors[i]);
      bool symbolic = lookup(symbols_, tensor.ptr()) != nullptr;
      tokens.append(symbolic ? py::handle(found_[i]) : tensor);
      if (!symbolic && found_[i].is_none() && !lookup(externals_, tensor.ptr())) {
        externals_[py::reinterpret_steal<py::object>(PyLong_FromVoidPtr(tensor.ptr()))] = alternative.bindings[i];
        fed_[alternative.bindings[i]] = tensor;
      }
    }
    for (const FeedPlan& feed : alternative.feeds) {
      at::Tensor tensor = THPVariable_Unpack(arguments_.tensors[feed.argument]);
      if (!feed.written && exclusive_ && tensor.storage().use_count() > 1) {
        tensor = tensor.detach().clone();
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
    for (PyObject* number : arguments_.numbers) numbers.append(py::handle(number));
    iteration_.attr("at") = node.id;
    if (PyList_Append(path_.ptr(), py::int_(node.id).ptr()) < 0) throw py::error_already_set();
    py::object record = names_.record(node.node, node.key, node.ambient, tokens, numbers, node.location);
    if (PyList_Append(records_.ptr(), record.ptr()) < 0) throw py::error_already_set();
    std::vector<py::object> outputs;
    for (size_t i = 0; i < node.output_metas.size(); ++i) {
      auto tensor = py::reinterpret_steal<py::object>(THPVariable_Wrap(node.output_metas[i].hollow()));
      py::object symbol =
          names_.symbol(tensor, node.output_bindings[i], node.output_metas[i].python, node.output_histories[i]);
      symbols_[py::reinterpret_steal<py::object>(PyLong_FromVoidPtr(tensor.ptr()))] = symbol;
      placeholders_[node.output_bindings[i]] = symbol;
      outputs.push_back(std::move(tensor));
    }
    return build(node.result, outputs);
  }

  py::object build(const py::handle& result, const std::vector<py::object>& outputs) {
    auto* kind = reinterpret_cast<PyObject*>(Py_TYPE(result.ptr()));
    if (kind == names_.new_tensor) return outputs[result.attr(names_.index).cast<size_t>()];
    if (kind == names_.same_tensor) {
      return py::reinterpret_borrow<py::object>(arguments_.tensors[result.attr(names_.index).cast<size_t>()]);
    }
    if (kind != names_.container) return py::reinterpret_borrow<py::object>(result);
    auto items = result.attr(names_.items).cast<py::tuple>();
    py::list built;
    for (const auto& item : items) built.append(build(item, outputs));
    py::object container = result.attr(names_.kind);
    if (container.is(py::type::of(built))) return built;
    return container.is(py::type::of(items)) ? py::object(py::tuple(built)) : container(built);
  }

  Names names_;
  py::function ambient_;
  std::vector<Node> nodes_;
  std::unordered_map<int64_t, std::vector<int64_t>> children_;
  Ambient fingerprint_{};
  py::object ambient_state_;
  std::unordered_map<PyObject*, bool> ambient_matches_;
  py::object iteration_, symbols_, placeholders_, externals_, fed_, path_, records_, late_, outermost_;
  Runner* runner_ = nullptr;
  bool exclusive_ = false;
  Arguments arguments_;
  std::vector<py::object> found_;  // the binding of each tensor argument; None for one that is new
};

Names names_from(const py::dict& d) {
  Names n;
  n.new_tensor = d["NewTensor"].ptr();
  n.same_tensor = d["SameTensor"].ptr();
  n.container = d["Container"].ptr();
  n.opaque = d["Opaque"].ptr();
  n.tensor = d["Tensor"].ptr();
  n.symbol = d["Symbol"];
  n.record = d["EventRecord"];
  n.index = py::str("index");
  n.items = py::str("items");
  n.kind = py::str("kind");
  n.value = py::str("value");
  n.binding = py::str("binding");
  n.meta = py::str("meta");
  return n;
}

}  // namespace

c10::IValue transformed(PyObject* number, const std::string& transform) {
  if (PyLong_CheckExact(number)) {
    int64_t v = PyLong_AsLongLong(number);
    if (transform == "x") return v;
    if (transform == "-x") return -v;
    if (transform == "1 - x") return 1 - v;
    return transform == "1 / x" ? (v ? 1.0 / static_cast<double>(v) : NAN) : static_cast<double>(v);
  }
  double v = PyFloat_AS_DOUBLE(number);
  if (transform == "-x") return -v;
  if (transform == "1 - x") return 1 - v;
  if (transform == "1 / x") return v != 0 ? 1 / v : NAN;
  return v;
}

void bind_walker(py::module_& m) {
  py::class_<Walker>(m, "Walker")
      .def(py::init([](const py::list& nodes, const std::unordered_map<int64_t, std::vector<int64_t>>& children,
                       const py::dict& names, const py::function& ambient) {
        return std::make_unique<Walker>(nodes, children, names_from(names), ambient);
      }))
      .def("begin", &Walker::begin)
      .def("end", &Walker::end)
      .def("step", &Walker::step);
  m.def("ambient_fingerprint", &ambient_fingerprint);
  m.def("is_transformed", &is_transformed);
}

}  // namespace coexec
