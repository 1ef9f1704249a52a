// Memory of the GraphRunner's values, which the next values of the same size get.
//
// An iteration makes tensors of the same sizes as the one before. malloc takes each from its lists and puts it back,
// joins what is free and parts it again, and gives memory back to the system that the next iteration asks for anew.
#pragma once

#include <pybind11/pybind11.h>

namespace coexec {

// While one of these is there, what the calling thread allocates comes from memory that is kept.
class KeepsMemory {
 public:
  KeepsMemory();
  ~KeepsMemory();
  KeepsMemory(const KeepsMemory&) = delete;
  KeepsMemory& operator=(const KeepsMemory&) = delete;

 private:
  bool before_;
};

// The same for an iteration on a thread of Python: runners without work leave it what is kept.
class BorrowsMemory : public KeepsMemory {
 public:
  BorrowsMemory();
  ~BorrowsMemory();
};

// Says that an iteration begins: how much memory is kept depends on what the last iterations needed.
void begin_keeping();

// Gives back all that is kept and not in use.
void give_memory_back();

// The same, unless somebody borrows it: what a runner's thread does that has no work.
void give_idle_memory_back();

// Gives memory that malloc has no use for back to the system, where malloc does not do so by itself: what eager
// iterations have freed is no use to the GraphRunner's thread.
void trim_memory();

void bind_kept_memory(pybind11::module_& m);

}  // namespace coexec
