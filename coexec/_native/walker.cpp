#include "walker.h"

#include "ambient.h"
#include "calls.h"
#include "location.h"
#include "meta.h"
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
  std::vector<bool> fed_here;        // of each: whether an external tensor is first used as this argument
  std::vector<FeedPlan> feeds;
  int64_t select = -1;
};

// Objects of Python that the walker makes and reads.
struct WalkerNames {
  Names calls;
  py::object symbol, record, binding, meta, at;
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
    for (const auto& b : alternative["bindings"].cast<py::tuple>()) {
      bool fed = py::hasattr(b, "argument") && b.attr("node").cast<int64_t>() == n.id &&
                 b.attr("argument").cast<size_t>() == out.bindings.size();
      out.fed_here.push_back(fed);
      out.bindings.push_back(py::reinterpret_borrow<py::object>(b));
    }
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
  Walker(const py::list& nodes, const std::unordered_map<int64_t, std::vector<int64_t>>& children, WalkerNames names,
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
    auto at = py::getattr(iteration_, names_.at).cast<int64_t>();
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
      if (!match_call(args.ptr(), kwargs.ptr(), node.key.ptr(), names_.calls, arguments_)) continue;
      if (!fits(node)) continue;
      for (const Alternative& alternative : node.alternatives) {
        if (!binds(alternative)) continue;
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
        if (is_exposed(external)) return false;
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

  bool binds(const Alternative& alternative) {
    for (size_t i = 0; i < found_.size(); ++i) {
      PyObject* expected = alternative.bindings[i].ptr();
      if (!found_[i].is_none()) {
        if (!equal(found_[i].ptr(), expected)) return false;
      } else if (!alternative.fed_here[i]) {  // it is new in this iteration
        return false;
      }
    }
    return true;
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
    py::setattr(iteration_, names_.at, py::int_(node.id));
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
    return build(node.result, outputs, arguments_.tensors, names_.calls);
  }

  WalkerNames names_;
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

WalkerNames walker_names_from(const py::dict& d) {
  return {names_from(d), d["Symbol"], d["EventRecord"], py::str("binding"), py::str("meta"), py::str("at")};
}

}  // namespace

void bind_walker(py::module_& m) {
  py::class_<Walker>(m, "Walker")
      .def(py::init([](const py::list& nodes, const std::unordered_map<int64_t, std::vector<int64_t>>& children,
                       const py::dict& names, const py::function& ambient) {
        return std::make_unique<Walker>(nodes, children, walker_names_from(names), ambient);
      }))
      .def("begin", &Walker::begin)
      .def("end", &Walker::end)
      .def("step", &Walker::step);
  m.def("ambient_fingerprint", &ambient_fingerprint);
  m.def("is_transformed", &is_transformed);
}

}  // namespace coexec
