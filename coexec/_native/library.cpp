#include "library.h"

#include <torch/extension.h>

#include <memory>
#include <stdexcept>

namespace py = pybind11;

namespace coexec {

std::vector<at::Tensor> PythonFunction::run(const std::vector<at::Tensor>& inputs) {
  py::gil_scoped_acquire gil;
  try {
    return function_(inputs).cast<std::vector<at::Tensor>>();
  } catch (py::error_already_set& error) {
    throw std::runtime_error(error.what());  // which outlives the GIL
  }
}

void bind_library(py::module_& m) {
  py::class_<Library, std::shared_ptr<Library>>(m, "Library")
      .def(py::init([](const std::string& path) -> std::shared_ptr<Library> {
        return std::make_shared<AheadOfTime>(path);
      }))
      .def(py::init([](py::function function) -> std::shared_ptr<Library> {
        return std::make_shared<PythonFunction>(std::move(function));
      }));
}

}  // namespace coexec
