// What compiled blocks call in place of PyTorch's functions and of OpenMP's: random numbers are drawn several at a
// time, and large kernels are computed in parts.
//
// A block is compiled with other names for these functions (see `_private_inductor.py`), and finds them here.
#include "kernels.h"

#include "convolution.h"
#include "draws.h"
#include "parts.h"

#include <ATen/Functions.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>

#if defined(__linux__)
#include <dlfcn.h>
#endif

#include <algorithm>
#include <optional>

#define COEXEC_FOR_BLOCKS extern "C" __attribute__((visibility("default")))

namespace coexec {

namespace {

const at::Tensor& tensor_of(AtenTensorHandle handle) {
  return *torch::aot_inductor::tensor_handle_to_tensor_pointer(handle);
}

// Along which dimension of its result a product is cut; -1 if it is computed as a whole.
int64_t cut_of(const at::Tensor& out, int64_t inner) {
  if (2.0 * static_cast<double>(out.numel()) * static_cast<double>(inner) < kLeastWork) return -1;
  int64_t dim = out.dim() == 3 || out.size(0) >= out.size(1) ? 0 : 1;
  return out.size(dim) >= kParts ? dim : -1;
}

// What a part of the result along `dim` needs of a tensor that is broadcast to the result.
at::Tensor addend(const at::Tensor& tensor, const at::Tensor& out, int64_t dim, int part) {
  int64_t own = dim - (out.dim() - tensor.dim());
  return own < 0 || tensor.size(own) == 1 ? tensor : piece(tensor, own, part);
}

Convolution make_convolution(
    const int64_t* stride, int64_t stride_n, const int64_t* padding, int64_t padding_n, const int64_t* dilation,
    int64_t dilation_n, int32_t transposed, const int64_t* output_padding, int64_t output_padding_n, int64_t groups) {
  auto list = [](const int64_t* data, int64_t size) { return at::IntArrayRef(data, static_cast<size_t>(size)); };
  return {list(stride, stride_n), list(padding, padding_n), list(dilation, dilation_n),
          list(output_padding, output_padding_n), transposed != 0, groups};
}

// Which part of a region a thread computes, of how many.
thread_local int region_part = 0, region_parts = 1;

}  // namespace

bool show_names() {
#if defined(__linux__)
  Dl_info info;
  if (!dladdr(reinterpret_cast<void*>(&show_names), &info) || !info.dli_fname) return false;
  return dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_GLOBAL) != nullptr;
#else
  return false;
#endif
}

void bind_kernels(pybind11::module_& m) { m.def("show_names", &show_names); }

}  // namespace coexec

using coexec::Convolution;
using coexec::compute_parts;
using coexec::piece;
using coexec::tensor_of;
using torch::aot_inductor::new_tensor_handle;
using torch::aot_inductor::resolve_tensor_dispatch_flags;

COEXEC_FOR_BLOCKS AOTITorchError
coexec_cpu_mm_out(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat2) {
  const at::Tensor &to = tensor_of(out), &a = tensor_of(self), &b = tensor_of(mat2);
  int64_t dim = coexec::cut_of(to, a.size(-1));
  if (dim < 0) return aoti_torch_cpu_mm_out(out, self, mat2);
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    compute_parts([&](int part) {
      at::Tensor target = piece(to, dim, part);
      at::mm_out(target, dim == 0 ? piece(a, 0, part) : a, dim == 1 ? piece(b, 1, part) : b);
    });
  });
}

COEXEC_FOR_BLOCKS AOTITorchError coexec_cpu_addmm_out(
    AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat1, AtenTensorHandle mat2, double beta,
    double alpha) {
  const at::Tensor &to = tensor_of(out), &added = tensor_of(self), &a = tensor_of(mat1), &b = tensor_of(mat2);
  int64_t dim = coexec::cut_of(to, a.size(-1));
  if (dim < 0) return aoti_torch_cpu_addmm_out(out, self, mat1, mat2, beta, alpha);
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    compute_parts([&](int part) {
      at::Tensor target = piece(to, dim, part);
      at::addmm_out(target, coexec::addend(added, to, dim, part), dim == 0 ? piece(a, 0, part) : a,
                    dim == 1 ? piece(b, 1, part) : b, beta, alpha);
    });
  });
}

COEXEC_FOR_BLOCKS AOTITorchError
coexec_cpu_bmm_out(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat2) {
  const at::Tensor &to = tensor_of(out), &a = tensor_of(self), &b = tensor_of(mat2);
  if (coexec::cut_of(to, a.size(-1)) < 0) return aoti_torch_cpu_bmm_out(out, self, mat2);
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    compute_parts([&](int part) {
      at::Tensor target = piece(to, 0, part);
      at::bmm_out(target, piece(a, 0, part), piece(b, 0, part));
    });
  });
}

COEXEC_FOR_BLOCKS AOTITorchError coexec_cpu_baddbmm_out(
    AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle batch1, AtenTensorHandle batch2, double beta,
    double alpha) {
  const at::Tensor &to = tensor_of(out), &added = tensor_of(self), &a = tensor_of(batch1), &b = tensor_of(batch2);
  if (coexec::cut_of(to, a.size(-1)) < 0) return aoti_torch_cpu_baddbmm_out(out, self, batch1, batch2, beta, alpha);
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    compute_parts([&](int part) {
      at::Tensor target = piece(to, 0, part);
      at::baddbmm_out(
          target, coexec::addend(added, to, 0, part), piece(a, 0, part), piece(b, 0, part), beta, alpha);
    });
  });
}

COEXEC_FOR_BLOCKS AOTITorchError coexec_cpu_convolution(
    AtenTensorHandle input, AtenTensorHandle weight, AtenTensorHandle* bias, const int64_t* stride, int64_t stride_n,
    const int64_t* padding, int64_t padding_n, const int64_t* dilation, int64_t dilation_n, int32_t transposed,
    const int64_t* output_padding, int64_t output_padding_n, int64_t groups, AtenTensorHandle* result) {
  Convolution convolution = coexec::make_convolution(
      stride, stride_n, padding, padding_n, dilation, dilation_n, transposed, output_padding, output_padding_n, groups);
  const at::Tensor &x = tensor_of(input), &w = tensor_of(weight);
  if (!convolution.is_cut(x, w)) {
    return aoti_torch_cpu_convolution(
        input, weight, bias, stride, stride_n, padding, padding_n, dilation, dilation_n, transposed, output_padding,
        output_padding_n, groups, result);
  }
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    std::optional<at::Tensor> b = resolve_tensor_dispatch_flags(bias);
    *result = new_tensor_handle(convolution.in_parts(x, w, b));
  });
}

COEXEC_FOR_BLOCKS AOTITorchError coexec_cpu_convolution_backward(
    AtenTensorHandle grad, AtenTensorHandle input, AtenTensorHandle weight, const int64_t** bias_sizes,
    int64_t bias_sizes_n, const int64_t* stride, int64_t stride_n, const int64_t* padding, int64_t padding_n,
    const int64_t* dilation, int64_t dilation_n, int32_t transposed, const int64_t* output_padding,
    int64_t output_padding_n, int64_t groups, const int32_t* mask, int64_t mask_n, AtenTensorHandle* grad_input,
    AtenTensorHandle* grad_weight, AtenTensorHandle* grad_bias) {
  Convolution convolution = coexec::make_convolution(
      stride, stride_n, padding, padding_n, dilation, dilation_n, transposed, output_padding, output_padding_n, groups);
  const at::Tensor &g = tensor_of(grad), &x = tensor_of(input), &w = tensor_of(weight);
  std::array<bool, 3> asked{mask[0] != 0, mask[1] != 0, mask[2] != 0};
  if (!convolution.are_gradients_cut(x, w, asked)) {
    return aoti_torch_cpu_convolution_backward(
        grad, input, weight, bias_sizes, bias_sizes_n, stride, stride_n, padding, padding_n, dilation, dilation_n,
        transposed, output_padding, output_padding_n, groups, mask, mask_n, grad_input, grad_weight, grad_bias);
  }
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    at::OptionalIntArrayRef sizes;
    if (bias_sizes) sizes = at::IntArrayRef(*bias_sizes, static_cast<size_t>(bias_sizes_n));
    auto [of_input, of_weight, of_bias] =
        convolution.gradients_in_parts(g, x, w, sizes, asked);
    if (grad_input) *grad_input = new_tensor_handle(std::move(of_input));  // null where nobody uses it
    if (grad_weight) *grad_weight = new_tensor_handle(std::move(of_weight));
    if (grad_bias) *grad_bias = new_tensor_handle(std::move(of_bias));
  });
}

COEXEC_FOR_BLOCKS AOTITorchError coexec_cpu_rand(
    const int64_t* size, int64_t dims, int32_t* dtype, int32_t* layout, int32_t* device, int32_t device_index,
    int32_t* pinned, AtenTensorHandle* result) {
  auto type = static_cast<at::ScalarType>(dtype ? *dtype : -1);
  bool strided = !layout || *layout == static_cast<int32_t>(at::kStrided);
  if ((type != at::kFloat && type != at::kDouble) || !strided || (pinned && *pinned)) {
    return aoti_torch_cpu_rand(size, dims, dtype, layout, device, device_index, pinned, result);
  }
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    at::Tensor drawn = at::empty({size, static_cast<size_t>(dims)}, type);
    coexec::draw_uniform(drawn);
    *result = new_tensor_handle(std::move(drawn));
  });
}

// The region of a kernel that OpenMP would run on several threads. There is nothing in it for which they wait.
COEXEC_FOR_BLOCKS void __wrap_GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned /*flags*/) {
  int parts = std::max(static_cast<int>(threads), 1);
  auto compute = [&](int part) {
    coexec::region_part = part;
    coexec::region_parts = parts;
    body(data);
    coexec::region_part = 0;
    coexec::region_parts = 1;
  };
  compute_parts(compute, parts);
}

COEXEC_FOR_BLOCKS void __wrap_GOMP_barrier() {}

COEXEC_FOR_BLOCKS int __wrap_omp_get_thread_num() { return coexec::region_part; }

COEXEC_FOR_BLOCKS int __wrap_omp_get_num_threads() { return coexec::region_parts; }
