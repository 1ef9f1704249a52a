#include "queue.h"

#include "calls.h"

#include <ATen/Parallel.h>
#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <utility>

namespace py = pybind11;
using Clock = std::chrono::steady_clock;

namespace coexec {

namespace {

constexpr int kSpinMicroseconds = 100;

double seconds_since(Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); }

// Autograd runs what was made last first. Threads count what they make each for itself, so a thread
// that goes on where another one stopped has to count on from there.
void advance_sequence_to(uint64_t number) {
  while (at::sequence_number::peek() < number) at::sequence_number::get_and_increment();
}

}  // namespace

Recorded::Recorded(const py::dict& d)
    : register_count(d["registers"].cast<int64_t>()),
      outputs(d["outputs"].cast<std::vector<int64_t>>()),
      metas(metas_of(d["metas"])),
      writes(d["writes"].cast<bool>()),
      shares_memory(d["shares_memory"].cast<bool>()),
      random(d["random"].cast<bool>()) {
  for (const auto& call : d["calls"].cast<py::list>()) calls.push_back(parse_instruction(call.cast<py::dict>()));
  for (const auto& n : d["numbers"].cast<std::vector<std::tuple<int64_t, size_t, std::string>>>()) {
    numbers.push_back({std::get<0>(n), std::get<1>(n), std::get<2>(n)});
  }
}

Queue::Queue() : thread_([this] { loop(); }) {}

Queue::~Queue() {
  stop_ = true;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    to_queue_.notify_all();
  }
  py::gil_scoped_release release;
  thread_.join();
}

void Queue::begin(bool start) {
  std::lock_guard<std::mutex> lock(mutex_);
  started_ = start;
  thread_state_ = ThreadState::capture();
  new_thread_state_ = true;
}

std::vector<std::shared_ptr<Value>> Queue::run(
    std::shared_ptr<Recorded> recorded, std::vector<Operand> operands, std::vector<c10::IValue> numbers) {
  std::vector<std::shared_ptr<Value>> outputs;
  for (size_t i = 0; i < recorded->outputs.size(); ++i) outputs.push_back(std::make_shared<Value>());
  Item item{std::move(recorded), std::move(operands), std::move(numbers), outputs,
            at::get_num_threads(), ThreadState::current_stream(), at::sequence_number::peek()};
  std::vector<Item> done;  // dropped here, where the GIL is held
  {
    std::lock_guard<std::mutex> lock(mutex_);
    done.swap(done_);
    int64_t number = sent_ + 1;
    for (auto& output : outputs) output->number = number;
    items_.push_back(std::move(item));
    sent_.store(number, std::memory_order_release);
    if (sleeping_ && started_) to_queue_.notify_one();
  }
  return outputs;
}

template <typename Condition>
void Queue::wait_until(Condition condition) {
  std::vector<Item> done;
  std::unique_lock<std::mutex> lock(mutex_);
  if (!started_) {
    started_ = true;
    to_queue_.notify_one();
  }
  if (!condition()) {
    lock.unlock();
    py::gil_scoped_release release;
    while (true) {
      lock.lock();
      python_waits_ = true;
      bool ready = to_python_.wait_for(lock, std::chrono::milliseconds(50), condition);
      python_waits_ = false;
      lock.unlock();
      if (ready) break;
      py::gil_scoped_acquire acquire;
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    }
    lock.lock();
  }
  done.swap(done_);
  lock.unlock();
  advance_sequence_to(sequence_);
}

int64_t Queue::take_failure() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(failed_, -1);
}

int64_t Queue::wait(int64_t number) {
  wait_until([&] { return ran_ >= number; });
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (failed_ < 0) return -1;
  }
  return drain();
}

int64_t Queue::drain() {
  wait_until([this] { return sent_ == ran_; });
  return take_failure();
}

void Queue::loop() {
  at::init_num_threads();
  while (!stop_) {
    auto began = Clock::now();
    // Waking a thread costs more than most of the waits here are long: look for a while before sleeping.
    while (sent_.load(std::memory_order_acquire) == ran_.load(std::memory_order_relaxed) && !stop_ &&
           Clock::now() - began < std::chrono::microseconds(kSpinMicroseconds)) {
      std::this_thread::yield();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    if (items_.empty() || !started_) {
      sleeping_ = true;
      to_queue_.wait(lock, [this] { return stop_ || (!items_.empty() && started_); });
      sleeping_ = false;
    }
    if (stop_) return;
    if (new_thread_state_) {
      thread_state_.apply();
      new_thread_state_ = false;
    }
    stall_s_ += seconds_since(began);
    spans_.add(began, true);
    Item item = std::move(items_.front());
    items_.pop_front();
    bool skip = failed_ >= 0;
    lock.unlock();
    auto t = Clock::now();
    bool failed = false;
    std::vector<at::Tensor> outputs;
    if (!skip) {
      try {
        outputs = execute(item);
      } catch (const std::exception&) {
        failed = true;  // Python makes the call again, and raises what eager raises
      }
    }
    for (Operand& operand : item.operands) {
      if (auto* value = std::get_if<std::shared_ptr<Value>>(&operand)) value->reset();
    }
    lock.lock();
    busy_s_ += seconds_since(t);
    spans_.add(t, false);
    sequence_ = at::sequence_number::peek();
    if (failed) failed_ = ran_ + 1;
    for (size_t i = 0; i < outputs.size(); ++i) item.outputs[i]->tensor = std::move(outputs[i]);
    item.outputs.clear();
    done_.push_back(std::move(item));
    ran_.fetch_add(1, std::memory_order_release);
    if (python_waits_) to_python_.notify_all();
  }
}

std::vector<at::Tensor> Queue::execute(const Item& item) {
  if (at::get_num_threads() != item.threads) at::set_num_threads(item.threads);
  ThreadState::enter(item.stream);
  advance_sequence_to(item.sequence);
  const Recorded& recorded = *item.recorded;
  std::vector<c10::IValue> registers(recorded.register_count);
  for (size_t i = 0; i < item.operands.size(); ++i) {
    if (const auto* value = std::get_if<std::shared_ptr<Value>>(&item.operands[i])) {
      registers[i] = (*value)->tensor;
    } else {
      registers[i] = std::get<at::Tensor>(item.operands[i]);
    }
  }
  for (size_t i = 0; i < item.numbers.size(); ++i) registers[recorded.numbers[i].reg] = item.numbers[i];
  for (const Instruction& call : recorded.calls) {
    std::vector<c10::IValue> results = invoke(call, registers);
    if (call.outs.empty()) continue;
    TORCH_CHECK(results.size() == call.outs.size(), call.op->schema().name(), " returned ", results.size(),
                " values where ", call.outs.size(), " were recorded");
    for (size_t i = 0; i < results.size(); ++i) {
      if (call.outs[i] >= 0) registers[call.outs[i]] = std::move(results[i]);
    }
  }
  std::vector<at::Tensor> outputs;
  for (size_t i = 0; i < recorded.outputs.size(); ++i) {
    at::Tensor tensor = registers[recorded.outputs[i]].toTensor();
    TORCH_CHECK(recorded.metas[i].fits(tensor), "a recorded call gave a tensor of sizes ", tensor.sizes(),
                " where ", at::IntArrayRef(recorded.metas[i].shape), " were recorded");
    outputs.push_back(std::move(tensor));
  }
  return outputs;
}

void bind_queue(py::module_& m) {
  py::class_<Value, std::shared_ptr<Value>>(m, "Value")
      .def("tensor", [](const Value& v) { return v.tensor; })
      .def("set", [](Value& v, at::Tensor tensor) { v.tensor = std::move(tensor); });
  py::class_<Recorded, std::shared_ptr<Recorded>>(m, "Recorded").def(py::init<const py::dict&>());
  py::class_<Queue>(m, "Queue")
      .def(py::init<>())
      .def("begin", &Queue::begin)
      .def("run",
           [](Queue& queue, const std::shared_ptr<Recorded>& recorded, const std::vector<at::Tensor>& tensors,
              const py::list& numbers) {
             std::vector<Operand> operands(tensors.begin(), tensors.end());
             std::vector<c10::IValue> fed;
             for (const FedRegister& n : recorded->numbers) {
               fed.push_back(transformed(py::object(numbers[n.slot]).ptr(), n.transform));
             }
             return queue.run(recorded, std::move(operands), std::move(fed));
           })
      .def("wait", &Queue::wait)
      .def("drain", &Queue::drain)
      .def("ran", &Queue::ran)
      .def("record_spans", [](Queue& q, bool on) { q.spans().record(on); })
      .def("take_spans", [](Queue& q) { return q.spans().take(); })
      .def("times", &Queue::times);
}

}  // namespace coexec
