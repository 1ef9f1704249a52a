// The GraphRunner: executes a Program on a thread that never asks for the GIL.
//
// The PythonRunner talks to it through two channels: messages (fed tensors and numbers, the
// case or alternative that was taken) go in, in program order; fetched values come out by slot, since
// Python may look at a value or not.
#pragma once

#include "program.h"
#include "shared_work.h"
#include "spans.h"

#include <c10/core/Stream.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

namespace coexec {

// Values that the thread needs to compute as the thread that began the iteration would.
struct ThreadState {
  int num_threads = 1;
  unsigned int float_control = 0;   // the rounding and denormal bits of the SSE control register
  std::optional<c10::Stream> stream;  // of the accelerator, where there is one

  static ThreadState capture();
  void apply() const;

  bool operator==(const ThreadState&) const = default;
};

struct Cancelled {};

class Runner;

// A thread that executes the iterations of one or several GraphRunners, one after another.
class Worker {
 public:
  Worker();
  ~Worker();  // its runners have none left

  void execute(Runner& runner);
  void forget(Runner& runner);  // returns when it does nothing for this runner any more

 private:
  void loop();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Runner*> waiting_;
  Runner* running_ = nullptr;
  bool stop_ = false;
  std::thread thread_;
};

class Runner {
 public:
  // The iterations of runners with a common worker are executed in the order in which they are started.
  explicit Runner(std::shared_ptr<Worker> worker);
  ~Runner();

  const std::shared_ptr<Worker>& worker() const { return worker_; }
  void run();  // the worker's thread: executes the iteration
  bool leaves_processors() const;  // whether its kernels have threads of their own number, for Python to have one

  void begin(std::shared_ptr<Program> program, std::vector<at::Tensor> captured, bool start);
  void start();
  void send(c10::IValue message);
  void bind(int64_t symbol, int64_t value);  // what a symbol in sizes is in this iteration
  std::optional<int64_t> bound(int64_t symbol) const;  // PythonRunner side
  c10::IValue fetch(int64_t slot);  // a published value; GIL released while it waits
  void commit();           // the iteration is valid: let deferred instructions run
  bool wait_for_commit();  // until deferred calls begin to run, or the program has ended; which of the two
  void wait();             // until the program has ended; rethrows what failed in it
  void join();             // until the program has ended, whatever happened in it
  bool wait_for_draws();   // until no more random numbers will be drawn; whether the program still runs
  void cancel();           // stops the program and waits until the thread is idle
  void finish();           // drops all values of the iteration (call with the GIL held)
  c10::IValue value(int64_t reg) const { return registers_.at(reg); }
  bool committing() const;  // whether deferred calls have begun to run
  std::vector<double> times() const { return {busy_s_, stall_s_}; }
  Spans& spans() { return spans_; }

  c10::IValue receive();                // GraphRunner side: the next message
  void publish(int64_t slot, c10::IValue value);  // GraphRunner side
  static Runner*& current();            // the runner whose thread this is

  // Computes all parts of a kernel: a thread that waits for the calling thread's runner computes some of them.
  static void share(int parts, SharedWork::Body body, void* data);

 private:
  enum class State { Idle, Ready, Running, Done };

  void start_locked();
  void tell_python();  // that what it waits for may have come
  void wake_python();  // for there is work to share

  enum class Signals { Raise, Wait };
  // Python's side: waits, without the GIL, until a condition holds, and computes parts of kernels meanwhile.
  template <typename Condition>
  void wait_and_help(std::unique_lock<std::mutex>& lock, Condition condition, Signals signals = Signals::Raise);
  void execute();
  void check_deferred() const;  // what is put off to the commit has its values: it must not fail half way
  int64_t size(int64_t symbol);        // GraphRunner side: waits until it is bound
  void call(const Instruction& instruction);
  void draw(const Instruction& instruction);
  void compiled(const Instruction& instruction);

  mutable std::mutex mutex_;
  std::condition_variable to_graph_, to_python_;
  State state_ = State::Idle;
  std::atomic<bool> cancelled_{false};
  bool committed_ = false, committing_ = false;
  bool computed_ = false;  // whether only the commit is left
  bool drawn_ = false;  // no more random numbers will be drawn
  std::deque<c10::IValue> messages_;
  std::atomic<int64_t> available_{0};  // messages sent in this iteration
  int64_t taken_ = 0;                  // of them, by the GraphRunner
  std::vector<std::optional<int64_t>> symbols_;  // written by Python only
  std::vector<std::optional<int64_t>> known_;    // of them, by the GraphRunner
  bool graph_waits_ = false;
  std::vector<std::optional<c10::IValue>> published_;
  std::atomic<uint32_t> told_{0};  // how often Python has been told
  std::atomic<int> sleepers_{0};   // threads of Python that wait, and do not look
  SharedWork work_;
  std::vector<c10::IValue> kept_;  // messages already read: Python drops them, not this thread
  std::exception_ptr error_;
  std::string error_where_;
  ThreadState thread_state_;
  std::shared_ptr<Program> program_;
  std::vector<c10::IValue> registers_;
  std::vector<const Instruction*> deferred_;
  double busy_s_ = 0, stall_s_ = 0;
  Spans spans_;  // of executions, and of the waits within
  std::shared_ptr<Worker> worker_;
};

}  // namespace coexec
