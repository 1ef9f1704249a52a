#include "sender.h"

#include "ambient.h"
#include "calls.h"
#include "layout.h"
#include "queue.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <map>
#include <unordered_map>

namespace py = pybind11;

namespace coexec {
namespace {

// Memory, by what first held it in this stretch of calls: a storage of the program, or a value.
using Root = const void*;

struct Uses {
  int64_t any = 0, write = 0;  // numbers of the latest items that use the memory, that write to it
};

struct Symbol {
  py::object reference;  // weak: the program alone holds placeholders
  std::shared_ptr<Recorded> recorded;
  const Meta* meta;
  std::shared_ptr<Value> value;
  std::vector<Root> roots;
};

struct Variant {
  std::vector<NumberSlot> slots;
  std::shared_ptr<Recorded> recorded;
  py::object result;
};

struct Entry {
  py::object function, key, state;
  std::vector<Meta> metas;
  std::vector<size_t> repeated;  // for each tensor argument the first one that is the same object
  std::vector<Variant> variants;
};

// A call in the queue, with what is needed to make it again.
struct Sent {
  int64_t number;
  py::object function, key, state, numbers, result;
  std::vector<Operand> operands;
  std::vector<std::shared_ptr<Value>> values;
};

void mix(uint64_t& hash, uint64_t value) { hash = (hash ^ value) * 0x9e3779b97f4a7c15ull + (hash >> 29); }

void mix_tensors(PyObject* value, uint64_t& hash) {
  if (THPVariable_Check(value)) {
    const at::Tensor& tensor = THPVariable_Unpack(value);
    mix(hash, static_cast<uint64_t>(tensor.scalar_type()) + 64 * tensor.requires_grad());
    if (tensor.layout() != at::kStrided || tensor.is_nested()) return;
    for (int64_t size : tensor.sizes()) mix(hash, static_cast<uint64_t>(size));
  } else if (PyTuple_CheckExact(value) || PyList_CheckExact(value)) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); ++i) {
      mix_tensors(PySequence_Fast_GET_ITEM(value, i), hash);
    }
  }
}

class Sender {
 public:
  // Calls on at most `small` elements are answered with `run_now` if nothing in the queue uses the tensors.
  Sender(Queue* queue, const py::dict& names, py::function ambient, py::object run_now, int64_t small)
      : queue_(queue), small_(small), names_(names_from(names)), ambient_(std::move(ambient)), run_now_(std::move(run_now)) {
    forget_ = py::cpp_function([this](const py::handle& reference) {
      auto found = references_.find(reference.ptr());
      if (found == references_.end()) return;
      symbols_.erase(found->second);
      references_.erase(found);
    });
  }

  // `guard` is called before the first placeholder exists, `guarded` tells whether it still guards.
  void begin(py::function guard) { guard_ = std::move(guard); }

  void set_guarded(bool guarded) { guarded_ = guarded; }

  size_t add(py::object function, py::object key, py::object state, const py::list& metas,
             std::vector<size_t> repeated) {
    uint64_t hash = static_cast<uint64_t>(PyObject_Hash(function.ptr()));
    for (const auto& d : metas) {
      auto meta = d.cast<py::dict>();
      mix(hash, static_cast<uint64_t>(py::cast<at::ScalarType>(meta["dtype"])) +
                    64 * meta["requires_grad"].cast<bool>());
      for (int64_t size : meta["shape"].cast<std::vector<int64_t>>()) mix(hash, static_cast<uint64_t>(size));
    }
    entries_.push_back(std::make_unique<Entry>(
        Entry{std::move(function), std::move(key), std::move(state), metas_of(metas), std::move(repeated), {}}));
    table_[hash].push_back(entries_.back().get());
    return entries_.size() - 1;
  }

  void set(size_t entry, const py::list& variants) {
    auto& target = entries_.at(entry)->variants;
    target.clear();
    for (const auto& v : variants) {
      auto parts = v.cast<py::tuple>();
      Variant variant;
      for (const auto& slot : parts[0].cast<py::list>()) variant.slots.push_back(number_slot(slot.cast<py::dict>()));
      variant.recorded = parts[1].cast<std::shared_ptr<Recorded>>();
      variant.result = parts[2];
      target.push_back(std::move(variant));
    }
  }

  void clear() {
    table_.clear();
    entries_.clear();
    same_states_.clear();
  }

  py::object step(const py::object& function, const py::tuple& args, const py::object& kwargs) {
    auto not_implemented = py::reinterpret_borrow<py::object>(Py_NotImplemented);
    if (is_transformed()) return not_implemented;
    Py_hash_t function_hash = PyObject_Hash(function.ptr());
    if (function_hash == -1) throw py::error_already_set();
    uint64_t hash = static_cast<uint64_t>(function_hash);
    for (const auto& a : args) mix_tensors(a.ptr(), hash);
    if (PyDict_Check(kwargs.ptr())) {
      Py_ssize_t position = 0;
      PyObject *name, *value;
      while (PyDict_Next(kwargs.ptr(), &position, &name, &value)) mix_tensors(value, hash);
    }
    auto found = table_.find(hash);
    if (found == table_.end()) return not_implemented;
    const py::object& state = current_state();
    for (Entry* entry : found->second) {
      if (entry->variants.empty() || !equal(entry->function.ptr(), function.ptr())) continue;
      Arguments arguments;
      if (!match_call(args.ptr(), kwargs.ptr(), entry->key.ptr(), names_, arguments)) continue;
      if (!same_state(entry->state, state) || !fit(arguments.tensors, *entry)) continue;
      for (const Variant& variant : entry->variants) {
        if (!take(arguments.numbers, variant.slots)) continue;
        if (exposed_ && variant.recorded->keeps_arguments) return not_implemented;
        if (at_once(arguments.tensors, *variant.recorded)) return run_now_;
        py::list numbers;
        for (PyObject* number : arguments.numbers) numbers.append(py::handle(number));
        return send(variant.recorded, arguments.tensors, numbers, entry->function, entry->key, entry->state,
                    variant.result);
      }
    }
    return not_implemented;
  }

  py::object send(
      const std::shared_ptr<Recorded>& recorded, const std::vector<PyObject*>& tensors, const py::list& numbers,
      py::object function, py::object key, py::object state, py::object result) {
    std::vector<Operand> operands;
    std::vector<Root> roots;
    operands.reserve(tensors.size());
    for (PyObject* tensor : tensors) {
      auto symbol = symbols_.find(tensor);
      if (symbol != symbols_.end()) {
        operands.emplace_back(symbol->second.value);
        roots.insert(roots.end(), symbol->second.roots.begin(), symbol->second.roots.end());
      } else {
        const at::Tensor& real = THPVariable_Unpack(tensor);
        operands.emplace_back(is_exposed(real) ? copied(real) : real);
        roots.push_back(real.storage().unsafeGetStorageImpl());
      }
    }
    auto values = queue_->run(recorded, operands, recorded->fed(numbers));
    int64_t number = queue_->sent();
    for (Root root : roots) {
      Uses& uses = uses_[root];
      uses.any = number;
      if (recorded->writes) uses.write = number;
    }
    std::vector<py::object> outputs;
    for (size_t i = 0; i < values.size(); ++i) {
      outputs.push_back(placeholder(recorded, i, values[i], recorded->shares_memory ? roots : std::vector<Root>{}));
      if (!recorded->shares_memory) uses_[values[i].get()] = {number, number};
    }
    int64_t done = queue_->ran();
    while (!in_flight_.empty() && in_flight_.front().number <= done) in_flight_.pop_front();
    in_flight_.push_back({number, std::move(function), std::move(key), std::move(state), numbers, result,
                          std::move(operands), std::move(values)});
    ++count_;
    return build(result, outputs, tensors, names_);
  }

  py::object meta(const py::handle& tensor) const {
    auto found = symbols_.find(tensor.ptr());
    return found == symbols_.end() ? py::object(py::none()) : found->second.meta->python;
  }

  bool is_symbol(const py::handle& tensor) const { return symbols_.count(tensor.ptr()) != 0; }

  std::shared_ptr<Value> value(const py::handle& tensor) const { return symbols_.at(tensor.ptr()).value; }

  // The number of the latest item that writes to the tensor's memory.
  int64_t written_by(const py::handle& tensor) const {
    auto found = symbols_.find(tensor.ptr());
    if (found == symbols_.end()) {
      return uses_of(THPVariable_Unpack(tensor.ptr()).storage().unsafeGetStorageImpl()).write;
    }
    int64_t number = found->second.value->number;
    for (Root root : found->second.roots) number = std::max(number, uses_of(root).write);
    return number;
  }

  py::list symbols() const {
    py::list out;
    for (const auto& [object, symbol] : symbols_) {
      out.append(py::make_tuple(py::reinterpret_borrow<py::object>(object), symbol.value));
    }
    return out;
  }

  // The calls in the queue from item `number` on, in order.
  py::list in_flight(int64_t number) const {
    py::list out;
    for (const Sent& sent : in_flight_) {
      if (sent.number < number) continue;
      py::list operands;
      for (const Operand& operand : sent.operands) {
        if (const auto* value = std::get_if<std::shared_ptr<Value>>(&operand)) {
          operands.append(*value);
        } else {
          operands.append(std::get<at::Tensor>(operand));
        }
      }
      out.append(py::make_tuple(sent.function, sent.key, sent.state, operands, sent.numbers, sent.result, sent.values));
    }
    return out;
  }

  // Nothing is in the queue, and no placeholder left.
  void settle() {
    in_flight_.clear();
    symbols_.clear();
    references_.clear();
    uses_.clear();
  }

  int64_t count() const { return count_; }

 private:
  const py::object& current_state() {
    auto key = std::make_pair(ambient_fingerprint(), guarded_);
    auto found = states_.find(key);
    if (found == states_.end()) found = states_.emplace(key, ambient_(guarded_ ? 1 : 0)).first;
    return found->second;
  }

  bool same_state(const py::object& a, const py::object& b) {
    auto key = std::make_pair(a.ptr(), b.ptr());
    auto found = same_states_.find(key);
    if (found != same_states_.end()) return found->second;
    return same_states_[key] = equal(a.ptr(), b.ptr());
  }

  bool fit(const std::vector<PyObject*>& tensors, const Entry& entry) {
    const auto& metas = entry.metas;
    exposed_ = false;
    if (tensors.size() != metas.size()) return false;
    for (size_t i = 0; i < tensors.size(); ++i) {
      auto first = std::find(tensors.begin(), tensors.end(), tensors[i]) - tensors.begin();
      if (static_cast<size_t>(first) != entry.repeated[i]) return false;
      auto symbol = symbols_.find(tensors[i]);
      if (symbol != symbols_.end()) {
        const Meta& meta = *symbol->second.meta;
        if (meta.python.ptr() != metas[i].python.ptr() && !equal(meta.python.ptr(), metas[i].python.ptr())) return false;
        continue;
      }
      if (!THPVariable_CheckExact(tensors[i])) return false;
      const at::Tensor& real = THPVariable_Unpack(tensors[i]);
      if (!metas[i].fits(real) || real.is_inference() || real.is_conj() || real.is_neg()) return false;
      if (is_exposed(real)) {
        if (real.requires_grad()) return false;
        exposed_ = true;
      }
    }
    return true;
  }

  static bool take(const std::vector<PyObject*>& numbers, const std::vector<NumberSlot>& slots) {
    for (size_t i = 0; i < slots.size(); ++i) {
      if (!number_fits(numbers[i], slots[i])) return false;
    }
    return true;
  }

  bool at_once(const std::vector<PyObject*>& tensors, const Recorded& recorded) const {
    if (recorded.random || tensors.empty()) return false;
    int64_t elements = 0, done = queue_->ran();
    for (PyObject* tensor : tensors) {
      if (symbols_.count(tensor)) return false;
      const at::Tensor& real = THPVariable_Unpack(tensor);
      elements += real.numel();
      if (elements > small_ || !real.is_cpu() || (real.requires_grad() && at::GradMode::is_enabled())) return false;
      if (uses_of(real.storage().unsafeGetStorageImpl()).any > done) return false;
    }
    return true;
  }

  Uses uses_of(Root root) const {
    auto found = uses_.find(root);
    return found == uses_.end() ? Uses{} : found->second;
  }

  py::object placeholder(
      const std::shared_ptr<Recorded>& recorded, size_t output, const std::shared_ptr<Value>& value,
      std::vector<Root> roots) {
    if (!guarded_) {
      guard_();
      guarded_ = true;
    }
    const Meta& meta = recorded->metas[output];
    auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(meta.hollow()));
    auto reference = py::reinterpret_steal<py::object>(PyWeakref_NewRef(object.ptr(), forget_.ptr()));
    if (!reference) throw py::error_already_set();
    if (roots.empty()) roots.push_back(value.get());
    references_[reference.ptr()] = object.ptr();
    symbols_[object.ptr()] = {reference, recorded, &meta, value, std::move(roots)};
    return object;
  }

  Queue* queue_;
  int64_t small_;
  Names names_;
  py::function ambient_, guard_;
  py::object run_now_, forget_;
  std::vector<std::unique_ptr<Entry>> entries_;
  std::unordered_map<uint64_t, std::vector<Entry*>> table_;
  std::unordered_map<PyObject*, Symbol> symbols_;          // by placeholder
  std::unordered_map<PyObject*, PyObject*> references_;    // weak reference -> placeholder
  std::unordered_map<Root, Uses> uses_;
  std::deque<Sent> in_flight_;
  std::map<std::pair<Ambient, bool>, py::object> states_;
  std::map<std::pair<PyObject*, PyObject*>, bool> same_states_;  // both live as long as this does
  bool guarded_ = false, exposed_ = false;
  int64_t count_ = 0;
};

}  // namespace

void bind_sender(py::module_& m) {
  py::class_<Sender>(m, "Sender")
      .def(py::init<Queue*, const py::dict&, py::function, py::object, int64_t>(), py::keep_alive<1, 2>())
      .def("begin", &Sender::begin)
      .def("set_guarded", &Sender::set_guarded)
      .def("add", &Sender::add)
      .def("set", &Sender::set)
      .def("clear", &Sender::clear)
      .def("step", &Sender::step)
      .def("send",
           [](Sender& s, const std::shared_ptr<Recorded>& recorded, const py::list& tensors, const py::list& numbers,
              py::object function, py::object key, py::object state, py::object result) {
             std::vector<PyObject*> given;
             for (const auto& t : tensors) given.push_back(t.ptr());
             return s.send(recorded, given, numbers, std::move(function), std::move(key), std::move(state),
                           std::move(result));
           })
      .def("meta", &Sender::meta)
      .def("is_symbol", &Sender::is_symbol)
      .def("value", &Sender::value)
      .def("written_by", &Sender::written_by)
      .def("symbols", &Sender::symbols)
      .def("in_flight", &Sender::in_flight)
      .def("settle", &Sender::settle)
      .def("count", &Sender::count);
}

}  // namespace coexec
