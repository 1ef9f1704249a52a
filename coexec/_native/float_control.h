// How a thread rounds, and whether it flushes denormal numbers: modes of its own.
#pragma once

#if defined(__SSE__) || defined(_M_X64)
#include <xmmintrin.h>
#endif

namespace coexec {

// Status flags differ from moment to moment; only modes are state.
constexpr unsigned int kFloatModes = 0xffc0u;

#if defined(__SSE__) || defined(_M_X64)
inline unsigned int float_control() { return _mm_getcsr() & kFloatModes; }
inline void set_float_control(unsigned int modes) { _mm_setcsr((_mm_getcsr() & ~kFloatModes) | modes); }
#else
inline unsigned int float_control() { return 0; }
inline void set_float_control(unsigned int) {}
#endif

}  // namespace coexec
