#include "location.h"

#include <pybind11/stl.h>

#include <unordered_map>
#include <utility>
#include <vector>

#if PY_VERSION_HEX >= 0x030B0000 && PY_VERSION_HEX < 0x030C0000
#include <opcode.h>
#endif

namespace py = pybind11;

namespace coexec {
namespace {

using Site = std::pair<PyCodeObject*, int>;  // a code object and the instruction that is executing in it
using Chain = std::vector<Site>;

struct ChainHash {
  size_t operator()(const Chain& chain) const {
    size_t h = chain.size();
    for (const auto& [code, instruction] : chain) {
      h = (h ^ reinterpret_cast<size_t>(code) ^ static_cast<size_t>(instruction)) * 0x9E3779B97F4A7C15ull;
    }
    return h;
  }
};

// Interned chains keep their code objects alive, so a pointer names one code object for good.
struct Table {
  std::unordered_map<Chain, int64_t, ChainHash> ids;
  std::vector<const Chain*> chains;
  Chain scratch;
};

Table& table() {
  static Table* instance = new Table();  // never destroyed: it outlives the interpreter
  return *instance;
}

PyFrameObject* owned(PyFrameObject* frame) {
  Py_XINCREF(reinterpret_cast<PyObject*>(frame));
  return frame;
}

#if PY_VERSION_HEX >= 0x030B0000 && PY_VERSION_HEX < 0x030C0000
// Python 3.11 has two instructions for a call. Once it has specialized the first one, that one makes the
// call, and the second one is never reached: the place has to be the same before and after.
bool is_precall(unsigned char opcode) {
  switch (opcode) {
    case PRECALL:
    case PRECALL_ADAPTIVE:
    case PRECALL_BOUND_METHOD:
    case PRECALL_BUILTIN_CLASS:
    case PRECALL_BUILTIN_FAST_WITH_KEYWORDS:
    case PRECALL_METHOD_DESCRIPTOR_FAST_WITH_KEYWORDS:
    case PRECALL_NO_KW_BUILTIN_FAST:
    case PRECALL_NO_KW_BUILTIN_O:
    case PRECALL_NO_KW_ISINSTANCE:
    case PRECALL_NO_KW_LEN:
    case PRECALL_NO_KW_LIST_APPEND:
    case PRECALL_NO_KW_METHOD_DESCRIPTOR_FAST:
    case PRECALL_NO_KW_METHOD_DESCRIPTOR_NOARGS:
    case PRECALL_NO_KW_METHOD_DESCRIPTOR_O:
    case PRECALL_NO_KW_STR_1:
    case PRECALL_NO_KW_TUPLE_1:
    case PRECALL_NO_KW_TYPE_1:
    case PRECALL_PYFUNC:
      return true;
    default:
      return false;
  }
}

constexpr int kPrecallSize = 4;  // the instruction and its cache
#endif

int instruction_of(PyFrameObject* frame, PyCodeObject* code) {
#if PY_VERSION_HEX >= 0x030C0000
  return PyFrame_GetLasti(frame);
#elif PY_VERSION_HEX >= 0x030B0000
  int instruction = PyFrame_GetLasti(frame);
  if (instruction < 0) return instruction;
  bool precall = is_precall(static_cast<unsigned char>(code->co_code_adaptive[instruction]));
  return precall ? instruction + kPrecallSize : instruction;
#else
  return frame->f_lasti * 2;  // counted in code units before 3.11
#endif
}

}  // namespace

int64_t locate(int skip, PyObject* outermost) {
  Table& t = table();
  t.scratch.clear();
  PyFrameObject* frame = owned(PyEval_GetFrame());
  while (frame) {
    if (skip > 0) {
      --skip;
    } else {
      PyCodeObject* code = PyFrame_GetCode(frame);
      t.scratch.emplace_back(code, instruction_of(frame, code));
      Py_DECREF(reinterpret_cast<PyObject*>(code));
    }
    bool last = reinterpret_cast<PyObject*>(frame) == outermost;
    PyFrameObject* back = last ? nullptr : PyFrame_GetBack(frame);
    Py_DECREF(reinterpret_cast<PyObject*>(frame));
    frame = back;
  }
  auto found = t.ids.find(t.scratch);
  if (found != t.ids.end()) return found->second;
  for (const auto& site : t.scratch) Py_INCREF(reinterpret_cast<PyObject*>(site.first));
  auto id = static_cast<int64_t>(t.chains.size());
  auto inserted = t.ids.emplace(t.scratch, id).first;
  t.chains.push_back(&inserted->first);
  return id;
}

namespace {

std::vector<std::pair<py::object, int>> sites(int64_t id) {
  std::vector<std::pair<py::object, int>> out;
  for (const auto& [code, instruction] : *table().chains.at(id)) {
    out.emplace_back(py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(code)), instruction);
  }
  return out;
}

}  // namespace

void bind_location(py::module_& m) {
  m.def("locate", [](int skip, const py::object& outermost) { return locate(skip, outermost.ptr()); });
  m.def("sites", &sites);
}

}  // namespace coexec
