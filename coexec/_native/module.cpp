// Python bindings, and the operators through which a compiled block feeds and fetches.
#include "apply.h"
#include "bypass.h"
#include "captures.h"
#include "draws.h"
#include "entry.h"
#include "gradients.h"
#include "guards.h"
#include "kept_memory.h"
#include "kernel_threads.h"
#include "kernels.h"
#include "layout.h"
#include "library.h"
#include "location.h"
#include "queue.h"
#include "runner.h"
#include "sender.h"
#include "shortcuts.h"
#include "walker.h"

#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/extension.h>

#include <iostream>

namespace py = pybind11;
using coexec::Runner;

namespace {

// What is thrown here passes code that prints each exception as an error: one of a cancelled iteration is none.
template <typename Communicate>
auto quietly(Communicate communicate) {
  try {
    return communicate();
  } catch (const coexec::Cancelled&) {
    std::cerr.setstate(std::ios_base::failbit);  // until the block has been left, see Runner::compiled
    throw;
  }
}

// `geometry` is the number of dimensions, the sizes, and the strides: no list may be empty in a compiled block.
at::Tensor empty(at::IntArrayRef geometry, const at::TensorOptions& options) {
  auto dim = static_cast<size_t>(geometry[0]);
  return at::empty_strided(geometry.slice(1, dim), geometry.slice(1 + dim, dim), options);
}

// A compiled block orders its communication by passing a token from each operation to the next. The tensor
// `after` is not used: it is computed before the block waits for Python.
// `scalar_type` is a number because a compiled block of PyTorch 2.11 hands a dtype over as another one.
std::tuple<at::Tensor, at::Tensor> feed(
    const at::Tensor& token, const at::Tensor& /*after*/, at::IntArrayRef geometry, int64_t scalar_type,
    at::Device device) {
  auto dtype = static_cast<at::ScalarType>(scalar_type);
  Runner* runner = Runner::current();
  TORCH_CHECK(runner, "coexec::feed runs only inside of a GraphRunner");
  c10::IValue message = quietly([&] { return runner->receive(); });
  if (!message.isTensor()) return {token.clone(), at::scalar_tensor(message.toScalar(), dtype)};
  // A copy: the compiled block may write to what it got from an operator.
  at::Tensor value = empty(geometry, at::TensorOptions(dtype).device(device));
  return {token.clone(), value.copy_(message.toTensor())};
}

at::Tensor fetch(const at::Tensor& token, const at::Tensor& value, int64_t slot) {
  Runner* runner = Runner::current();
  TORCH_CHECK(runner, "coexec::fetch runs only inside of a GraphRunner");
  quietly([&] { runner->publish(slot, value.clone()); });
  return token.clone();
}

// What `bernoulli_(p)` leaves in a tensor of that geometry and type. The token orders draws.
std::tuple<at::Tensor, at::Tensor> bernoulli(
    const at::Tensor& token, at::IntArrayRef geometry, int64_t scalar_type, double p) {
  at::Tensor drawn = empty(geometry, at::TensorOptions(static_cast<at::ScalarType>(scalar_type)));
  coexec::draw_bernoulli(drawn, p);
  return {token.clone(), drawn};
}

// The default generator's methods, as operations in the order of draws.
at::Tensor rng_state() {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

void set_rng_state(const at::Tensor& state) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(state);
}

void seed_rng(const at::Tensor& seed) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_current_seed(static_cast<uint64_t>(seed.item<int64_t>()));
}

c10::IValue to_message(const py::object& value) {
  if (THPVariable_Check(value.ptr())) return THPVariable_Unpack(value.ptr());
  if (PyFloat_Check(value.ptr())) return PyFloat_AS_DOUBLE(value.ptr());
  return value.cast<int64_t>();
}

}  // namespace

TORCH_LIBRARY(coexec, m) {
  const std::vector<at::Tag> any_layout{at::Tag::flexible_layout};
  m.def(
      torch::schema("feed(Tensor token, Tensor after, int[] geometry, int scalar_type, Device device) "
                    "-> (Tensor, Tensor)"),
      any_layout);
  m.def(
      torch::schema("feed_of_any_size(Tensor token, Tensor after, SymInt[] geometry, int scalar_type, Device device) "
                    "-> (Tensor, Tensor)"),
      any_layout);
  m.def("fetch(Tensor token, Tensor value, int slot) -> Tensor");
  m.def("copied(Tensor self) -> Tensor");
  m.def("bernoulli(Tensor token, int[] geometry, int scalar_type, float p) -> (Tensor, Tensor)");
  m.def("bernoulli_of_any_size(Tensor token, SymInt[] geometry, int scalar_type, float p) -> (Tensor, Tensor)");
  const std::vector<at::Tag> draws{at::Tag::nondeterministic_seeded};
  m.def(torch::schema("rng_state() -> Tensor"), draws);
  m.def(torch::schema("set_rng_state(Tensor state) -> ()"), draws);
  m.def(torch::schema("seed_rng(Tensor seed) -> ()"), draws);
}

TORCH_LIBRARY_IMPL(coexec, CompositeExplicitAutograd, m) {
  m.impl("feed", feed);
  m.impl("feed_of_any_size", feed);
  m.impl("fetch", fetch);
  m.impl("copied", coexec::copied);
  m.impl("bernoulli", bernoulli);
  m.impl("bernoulli_of_any_size", bernoulli);
  m.impl("rng_state", rng_state);
  m.impl("set_rng_state", set_rng_state);
  m.impl("seed_rng", seed_rng);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("scalar_type", [](const py::object& dtype) {
    return static_cast<int64_t>(reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type);
  });
  m.def("dtype", [](int64_t scalar_type) {
    auto* dtype = reinterpret_cast<PyObject*>(torch::getTHPDtype(static_cast<at::ScalarType>(scalar_type)));
    return py::reinterpret_borrow<py::object>(dtype);
  });
  m.def("copied", &coexec::copied, "A copy that lies in memory as a tensor does; no dispatch mode sees it.");
  m.def("size_value", [](const py::handle& encoded, const std::vector<int64_t>& symbols) {
    return coexec::size_of(encoded).value([&](int64_t s) -> std::optional<int64_t> { return symbols.at(s); });
  });
  py::class_<coexec::Program, std::shared_ptr<coexec::Program>>(m, "Program").def(py::init(&coexec::make_program));
  py::class_<Runner>(m, "Runner")
      .def(py::init([] { return std::make_unique<Runner>(std::make_shared<coexec::Worker>()); }))
      .def(py::init([](const Runner& other) { return std::make_unique<Runner>(other.worker()); }))
      .def("begin", &Runner::begin)
      .def("bind", &Runner::bind)
      .def("bound", &Runner::bound)
      .def("send", [](Runner& r, const py::object& value) { r.send(to_message(value)); })
      .def("fetch", [](Runner& r, int64_t slot) { return torch::jit::toPyObject(r.fetch(slot)); })
      .def("commit", &Runner::commit)
      .def("wait_for_commit", &Runner::wait_for_commit)
      .def("wait", &Runner::wait)
      .def("join", &Runner::join)
      .def("wait_for_draws", &Runner::wait_for_draws)
      .def("cancel", &Runner::cancel)
      .def("committing", &Runner::committing)
      .def("finish", &Runner::finish)
      .def("times", &Runner::times)
      .def("record_spans", [](Runner& r, bool on) { r.spans().record(on); })
      .def("take_spans", [](Runner& r) { return r.spans().take(); })
      .def("value", [](Runner& r, int64_t reg) { return torch::jit::toPyObject(r.value(reg)); });
  m.def("release_kernel_threads", &coexec::release_kernel_threads);
  coexec::bind_apply(m);
  coexec::bind_bypass(m);
  coexec::bind_captures(m);
  coexec::bind_gradients(m);
  coexec::bind_guards(m);
  coexec::bind_kept_memory(m);
  coexec::bind_kernels(m);
  coexec::bind_library(m);
  coexec::bind_location(m);
  coexec::bind_entry(m);
  coexec::bind_shortcuts(m);
  coexec::bind_walker(m);
  coexec::bind_queue(m);
  coexec::bind_sender(m);
}
