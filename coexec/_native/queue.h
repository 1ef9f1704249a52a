// The GraphRunner of the dynamic phase: a thread that runs recorded calls in the order in which they
// are sent, with autograd, without ever asking for the GIL.
#pragma once

#include "meta.h"
#include "program.h"
#include "runner.h"
#include "spans.h"

#include <variant>

namespace coexec {

// What an output will be; set by the queue's thread.
struct Value {
  at::Tensor tensor;
  int64_t number = 0;  // of the item that makes it
};

using Operand = std::variant<std::shared_ptr<Value>, at::Tensor>;

// A number of the call, through a transform, in a register.
struct FedRegister {
  int64_t reg;
  size_t slot;
  std::string transform;
};

// A recorded call: its operations over registers. The first registers hold the tensor arguments.
struct Recorded {
  int64_t register_count = 0;
  std::vector<Instruction> calls;
  std::vector<FedRegister> numbers;
  std::vector<int64_t> outputs;
  std::vector<Meta> metas;  // of the outputs
  bool writes = false;         // to an argument
  bool shares_memory = false;  // writes to an argument or returns a view of one
  bool keeps_arguments = false;  // shares memory, or autograd may save an argument
  bool random = false;

  explicit Recorded(const pybind11::dict& encoded);

  // The numbers of a call as its operations take them.
  std::vector<c10::IValue> fed(const pybind11::list& given) const;
};

class Queue {
 public:
  Queue();
  ~Queue();

  void begin(bool start);  // an iteration; without `start` nothing runs before the first wait
  std::vector<std::shared_ptr<Value>> run(
      std::shared_ptr<Recorded> recorded, std::vector<Operand> operands, std::vector<c10::IValue> numbers);
  // Both return the number of the item that failed (later ones have been left out), or -1.
  int64_t wait(int64_t number);  // until that item is done
  int64_t drain();               // until nothing is left
  int64_t sent() const { return sent_; }              // number of the latest item
  int64_t ran() const { return ran_; }                // number of the latest item that is done
  std::vector<double> times() const { return {busy_s_, stall_s_}; }
  Spans& spans() { return spans_; }

 private:
  struct Item {
    std::shared_ptr<Recorded> recorded;
    std::vector<Operand> operands;
    std::vector<c10::IValue> numbers;
    std::vector<std::shared_ptr<Value>> outputs;
    ThreadState thread_state;
    uint64_t sequence;
  };

  void loop();
  std::vector<at::Tensor> execute(const Item& item);
  int64_t take_failure();
  template <typename Condition>
  void wait_until(Condition condition);

  mutable std::mutex mutex_;
  std::condition_variable to_queue_, to_python_;
  std::deque<Item> items_;
  std::vector<Item> done_;              // Python drops them: a tensor may own a Python object
  std::atomic<int64_t> sent_{0}, ran_{0};
  std::atomic<bool> stop_{false};
  bool started_ = true, sleeping_ = false;
  int64_t failed_ = -1;
  uint64_t sequence_ = 0;
  std::optional<ThreadState> thread_state_;  // that the thread is in
  double busy_s_ = 0, stall_s_ = 0;
  Spans spans_;  // of calls, and of the waits between them
  std::thread thread_;
};

void bind_queue(pybind11::module_& m);

}  // namespace coexec
