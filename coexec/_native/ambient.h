// The state around a call that changes what it computes; see coexec.tracegraph.ambient.
#pragma once
#include <cstdint>
#include <array>

namespace coexec {

using Ambient = std::array<int64_t, 4>;

// Whether a torch.func transform is running; the fingerprint does not tell one from another.
bool is_transformed();

// Two states outside of transforms are equal exactly when their fingerprints are.
Ambient ambient_fingerprint();

}  // namespace coexec
