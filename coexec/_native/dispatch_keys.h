// Sets of dispatch keys that are excluded where operations run below autograd.
#pragma once

#include <c10/core/DispatchKeySet.h>

namespace coexec {

inline constexpr c10::DispatchKeySet kAutograd = c10::autograd_dispatch_keyset;
inline constexpr c10::DispatchKeySet kAutogradAndViews =
    c10::autograd_dispatch_keyset | c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView);

}  // namespace coexec
