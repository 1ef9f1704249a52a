#include "ambient.h"

#include "float_control.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/anomaly_mode.h>

#if __has_include(<ATen/NodeCreationHooks.h>)  // PyTorch 2.14 has it
#include <ATen/NodeCreationHooks.h>
#define COEXEC_NODE_HOOKS
#endif

namespace coexec {

namespace {

int64_t autocast_state(c10::DeviceType device) {
  if (!at::autocast::is_autocast_enabled(device)) return -1;
  return static_cast<int64_t>(at::autocast::get_autocast_dtype(device));
}

// How kernels may round float32, by backend and kind of operation; and how the thread rounds.
int64_t precisions(const at::Context& context) {
  static const bool cuda = at::hasCUDA();  // these are in hash tables, which takes its time in each torch call
  int64_t all = float_control();
  for (auto backend : {at::Float32Backend::CUDA, at::Float32Backend::MKLDNN}) {
    if (backend == at::Float32Backend::CUDA && !cuda) continue;
    for (auto op : {at::Float32Op::CONV, at::Float32Op::RNN, at::Float32Op::MATMUL}) {
      all = all << 8 | static_cast<int64_t>(context.float32Precision(backend, op));
    }
  }
  return all;
}

}  // namespace

bool is_transformed() {
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

bool are_nodes_hooked() {
#ifdef COEXEC_NODE_HOOKS
  return !at::impl::NodeCreationHooks::empty();
#else
  return false;
#endif
}

Ambient ambient_fingerprint() {
  int64_t flags = at::GradMode::is_enabled() | c10::InferenceMode::is_enabled() << 1 |
                  at::globalContext().deterministicAlgorithms() << 2 |
                  torch::autograd::AnomalyMode::is_enabled() << 3 |
                  at::SavedTensorDefaultHooks::is_enabled() << 4;
  if (at::SavedTensorDefaultHooks::get_hooks(true).has_value()) flags |= 1 << 5;
  if (are_nodes_hooked()) flags |= 1 << 6;
  auto& context = at::globalContext();
  flags |= static_cast<int64_t>(context.userEnabledFlashSDP()) << 44 |
           static_cast<int64_t>(context.userEnabledMathSDP()) << 45 |
           static_cast<int64_t>(context.userEnabledMemEfficientSDP()) << 46 |
           static_cast<int64_t>(context.userEnabledMkldnn()) << 47 |
           static_cast<int64_t>(context.userEnabledCuDNN()) << 48 |
           static_cast<int64_t>(context.benchmarkCuDNN()) << 49 |
           static_cast<int64_t>(context.deterministicCuDNN()) << 50;
  flags |= static_cast<int64_t>(c10::typeMetaToScalarType(c10::get_default_dtype())) << 8;
  flags |= static_cast<int64_t>(at::get_num_threads()) << 16;
  flags |= static_cast<int64_t>(c10::impl::TorchDispatchModeTLS::stack_len()) << 32;
  return {flags, autocast_state(c10::DeviceType::CPU), autocast_state(c10::DeviceType::CUDA), precisions(context)};
}

}  // namespace coexec
