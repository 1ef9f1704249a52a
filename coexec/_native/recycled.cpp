#include "recycled.h"

#include "bypass.h"

#include <ATen/EmptyTensor.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

namespace py = pybind11;

namespace coexec {
namespace {

// Whether Python code has neither given an object attributes nor refers to it weakly.
bool is_bare(PyObject* object) {
  Py_ssize_t weak = Py_TYPE(object)->tp_weaklistoffset;
  if (weak != 0 && *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + weak)) return false;
  PyObject** dict = _PyObject_GetDictPtr(object);
  return !dict || !*dict || PyDict_GET_SIZE(*dict) == 0;
}

bool has_hooks(const THPVariable& variable) {
  auto some = [](PyObject* hooks) { return hooks && hooks != Py_None; };
  return some(variable.backward_hooks) || some(variable.post_accumulate_grad_hooks);
}

// Whether autograd knows no more of a tensor than whether it requires gradients.
bool has_no_history(const at::Tensor& tensor) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  if (!meta) return true;
  return meta->name_.empty() && !meta->grad_.defined() && !meta->grad_fn_ && meta->grad_accumulator_.expired() &&
         !meta->fw_grad_ && meta->hooks_.empty() && !meta->cpp_hooks_list_ && !meta->post_acc_grad_hooks_ &&
         !meta->retains_grad_ && !meta->is_view_;
}

bool is_as_made(const at::Tensor& tensor, const Placeholder& made, const Meta& meta) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  if (impl.key_set() != made.keys || !impl.has_storage()) return false;
  const c10::Storage& storage = tensor.storage();
  return storage.use_count() == 1 && !storage.unsafeGetStorageImpl()->data() && storage.nbytes() == made.bytes &&
         tensor.scalar_type() == meta.dtype && tensor.requires_grad() == meta.requires_grad && has_no_history(tensor) &&
         !(impl.version_counter().enabled() && impl.version_counter().current_version() != 0) &&
         tensor.dim() == static_cast<int64_t>(meta.shape.size());
}

bool has_sizes(const at::Tensor& tensor, at::IntArrayRef shape, at::IntArrayRef stride, int64_t offset) {
  return tensor.sizes() == shape && tensor.strides() == stride && tensor.storage_offset() == offset;
}

}  // namespace

Placeholder make_placeholder(const Meta& meta, PyObject* symbol_class, const SymbolSlots& slots, at::IntArrayRef shape,
                             at::IntArrayRef stride, int64_t offset) {
  Placeholder made;
  at::Tensor tensor = meta.hollow(shape, stride, offset);
  made.keys = tensor.key_set();
  made.bytes = tensor.storage().nbytes();
  auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(tensor)));
  made.id = py::reinterpret_steal<py::object>(PyLong_FromVoidPtr(object.ptr()));
  made.symbol = make_instance(symbol_class);
  slots.tensor.set(made.symbol.ptr(), object.ptr());
  return made;
}

Placeholder Left::placeholder(size_t output, const SymbolSlots& slots, at::IntArrayRef shape, at::IntArrayRef stride,
                              int64_t offset) {
  if (placeholders_[output].empty()) return {};
  Placeholder found = std::move(placeholders_[output].back());
  placeholders_[output].pop_back();
  const at::Tensor& tensor = THPVariable_Unpack(slots.tensor.get(found.symbol.ptr()));
  if (!has_sizes(tensor, shape, stride, offset)) {
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(shape, stride, offset);
    found.bytes = at::detail::computeStorageNbytes(shape, stride, tensor.dtype().itemsize(), offset);
    tensor.storage().unsafeGetStorageImpl()->set_nbytes(found.bytes);
  }
  return found;
}

py::object Left::record() {
  if (records_.empty()) return {};
  py::object found = std::move(records_.back());
  records_.pop_back();
  return found;
}

void Left::take(Placeholder placeholder, size_t output, const SymbolSlots& slots, const Meta& meta) {
  if (placeholders_[output].size() >= kMost || Py_REFCNT(placeholder.symbol.ptr()) != 1) return;
  PyObject* object = slots.tensor.get(placeholder.symbol.ptr());
  bool plain = reinterpret_cast<PyObject*>(Py_TYPE(object)) == THPVariableClass;
  if (Py_REFCNT(object) != 1 || !plain || !is_bare(object)) return;
  const auto& variable = *reinterpret_cast<THPVariable*>(object);
  if (variable.cdata.use_count() != 1 || has_hooks(variable) || !is_as_made(variable.cdata, placeholder, meta)) return;
  placeholders_[output].push_back(std::move(placeholder));
}

void Left::take(py::object record, const RecordSlots& slots, PyObject* produced) {
  if (records_.size() >= kMost || Py_REFCNT(record.ptr()) != 1) return;
  if (slots.exposure.get(record.ptr()) != Py_None) return;
  PyObject* tokens = slots.tokens.get(record.ptr());
  bool own = PyTuple_CheckExact(tokens);
  for (Py_ssize_t i = 0; own && i < PyTuple_GET_SIZE(tokens); ++i) {
    own = reinterpret_cast<PyObject*>(Py_TYPE(PyTuple_GET_ITEM(tokens, i))) == produced;
  }
  if (!own) slots.tokens.set(record.ptr(), Py_None);  // no tensor of the user's is kept alive
  records_.push_back(std::move(record));
}

py::object tuple_of(const std::vector<PyObject*>& items, PyObject* before) {
  auto count = static_cast<Py_ssize_t>(items.size());
  if (before && PyTuple_CheckExact(before) && PyTuple_GET_SIZE(before) == count &&
      std::equal(items.begin(), items.end(), reinterpret_cast<PyTupleObject*>(before)->ob_item)) {
    return py::reinterpret_borrow<py::object>(before);
  }
  py::tuple made(count);
  for (Py_ssize_t i = 0; i < count; ++i) PyTuple_SET_ITEM(made.ptr(), i, Py_NewRef(items[i]));
  untrack(made.ptr());
  return made;
}

}  // namespace coexec
