#include "layout.h"

#include "dispatch_keys.h"

#include <ATen/Functions.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <vector>

namespace coexec {
namespace {

const c10::DispatchKeySet kNotForCopies =
    kAutogradAndViews | c10::DispatchKeySet(c10::DispatchKey::Python) |
    c10::DispatchKeySet(c10::DispatchKey::PythonTLSSnapshot);

// Memory of tensors begins with one of these.
constexpr uintptr_t kCacheLine = 64;

// How many elements there are between the first and the last one, with these.
int64_t span_of(const at::Tensor& tensor) {
  int64_t span = 1;
  for (int64_t d = 0; d < tensor.dim(); ++d) span += (tensor.size(d) - 1) * tensor.stride(d);
  return span;
}

// Whether elements may lie on each other: no if each dimension steps over all that the smaller ones span.
bool may_overlap(const at::Tensor& tensor) {
  std::vector<std::pair<int64_t, int64_t>> dimensions;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) > 1) dimensions.emplace_back(tensor.stride(d), tensor.size(d));
  }
  std::sort(dimensions.begin(), dimensions.end());
  int64_t span = 1;
  for (const auto& [stride, size] : dimensions) {
    if (stride < span) return true;
    span += (size - 1) * stride;
  }
  return false;
}

// Memory for a copy, wherever it begins.
at::Tensor anywhere(const at::Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options());
}

// Memory for a copy, which begins at the same place of a cache line.
at::Tensor aligned(const at::Tensor& tensor) {
  const auto place = tensor.numel() == 0 ? 0 : reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kCacheLine;
  if (place == 0) return anywhere(tensor);
  const auto bytes = static_cast<int64_t>(place) + span_of(tensor) * tensor.itemsize();
  at::Tensor memory = at::empty({bytes}, tensor.options().dtype(at::kByte));
  void* begin = static_cast<char*>(memory.mutable_data_ptr()) + place;
  return at::from_blob(begin, tensor.sizes(), tensor.strides(), [memory](void*) {}, tensor.options());
}

at::Tensor copied_to(at::Tensor (*memory_for)(const at::Tensor&), const at::Tensor& tensor) {
  c10::impl::ExcludeDispatchKeyGuard guard(kNotForCopies);
  if (tensor.layout() != at::kStrided || tensor.is_nested() || tensor._is_zerotensor()) return tensor.clone();
  at::Tensor made = memory_for(tensor);
  if (tensor.numel() == 0) return made;
  if (!may_overlap(tensor)) return made.copy_(tensor);
  int64_t span = span_of(tensor);
  made.as_strided({span}, {1}, 0).copy_(tensor.as_strided({span}, {1}, tensor.storage_offset()));
  return made;
}

}  // namespace

at::Tensor copied(const at::Tensor& tensor) { return copied_to(&aligned, tensor); }

at::Tensor copied_anywhere(const at::Tensor& tensor) { return copied_to(&anywhere, tensor); }

}  // namespace coexec
