// The state around a call that changes what it computes; see coexec.tracegraph.ambient.
#pragma once
#include <cstdint>
#include <array>

namespace coexec {

using Ambient = std::array<int64_t, 4>;

// Whether a torch.func transform is running; the fingerprint does not tell one from another.
bool is_transformed();

// Whether hooks of the user see each autograd node that is made.
bool are_nodes_hooked();

// Two states outside of transforms are equal exactly when their fingerprints are.
Ambient ambient_fingerprint();

}  // namespace coexec
