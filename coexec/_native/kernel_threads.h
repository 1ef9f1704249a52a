// The threads on which kernels of the calling thread run.
#pragma once

namespace coexec {

// Lets the OpenMP runtime end the idle workers of the calling thread; its next parallel kernel starts new ones.
//
// Each thread that runs kernels has workers of its own. When there are more of them than processors, GNU's
// runtime no longer lets any of them wait actively, and each parallel kernel of every thread pays for waking
// its workers: a GraphRunner beside a main thread that has run kernels would be up to three times slower.
// Does nothing with other runtimes.
void release_kernel_threads();

// Has kernels of the calling thread, and of no other one, run on that many threads.
//
// at::set_num_threads also decides for threads that begin later on, and for these the number of PyTorch is right.
void limit_kernel_threads(int threads);

}  // namespace coexec
