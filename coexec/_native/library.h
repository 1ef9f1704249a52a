// What a compiled block runs: functions from its inputs to its results.
#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <string>
#include <vector>

namespace coexec {

class Library {
 public:
  virtual ~Library() = default;
  virtual std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs) = 0;
};

// A package that TorchInductor has made; needs no GIL.
class AheadOfTime : public Library {
 public:
  explicit AheadOfTime(const std::string& path) : loader_(path) {}
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs) override { return loader_.run(inputs); }

 private:
  torch::inductor::AOTIModelPackageLoader loader_;
};

// A Python function on a list of tensors: the graph of a block without a compiler, to tell whose mistake it is.
class PythonFunction : public Library {
 public:
  explicit PythonFunction(pybind11::object function) : function_(std::move(function)) {}
  ~PythonFunction() override {
    pybind11::gil_scoped_acquire gil;
    function_ = pybind11::object();
  }
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs) override;

 private:
  pybind11::object function_;
};

void bind_library(pybind11::module_& m);

}  // namespace coexec
