// The threads on which kernels of the calling thread run.
#pragma once

#include <condition_variable>
#include <mutex>
#include <thread>

namespace coexec {

// Lets the OpenMP runtime end the idle workers of the calling thread; its next parallel kernel starts new ones.
//
// Each thread that runs kernels has workers of its own. When there are more of them than processors, GNU's
// runtime no longer lets any of them wait actively, and each parallel kernel of every thread pays for waking
// its workers: a GraphRunner beside a main thread that has run kernels would be up to three times slower.
// Does nothing with other runtimes.
void release_kernel_threads();

// As long as one of these is there, idle workers of GNU's OpenMP runtime sleep; usually they wait actively for
// milliseconds, and take the processor that Python or a kernel of one thread needs.
//
// Ending the workers of Python's thread would be no help: the one that the next kernel of Python starts may come
// to be on Python's processor, and gets it only after these milliseconds. So a thread holds more workers than
// there are processors, for then the runtime lets none wait actively. Does nothing with other runtimes.
class PassiveWorkers {
 public:
  PassiveWorkers();
  ~PassiveWorkers();
  PassiveWorkers(const PassiveWorkers&) = delete;
  PassiveWorkers& operator=(const PassiveWorkers&) = delete;

 private:
  void hold();

  std::mutex mutex_;
  std::condition_variable changed_;
  bool stop_ = false;
  std::thread thread_;
};

// While one of these is there, kernels of the calling thread run on no other.
class OneKernelThread {
 public:
  OneKernelThread();
  ~OneKernelThread();
  OneKernelThread(const OneKernelThread&) = delete;
  OneKernelThread& operator=(const OneKernelThread&) = delete;

 private:
  int threads_, mkl_threads_;
};

// Has kernels of the calling thread, and of no other one, run on that many threads.
//
// at::set_num_threads also decides for threads that begin later on, and for these the number of PyTorch is right.
void limit_kernel_threads(int threads);

}  // namespace coexec
