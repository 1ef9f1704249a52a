#include "queue.h"

#include "bypass.h"
#include "calls.h"
#include "kept_memory.h"
#include "waiting.h"

#include <ATen/Parallel.h>
#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <utility>

namespace py = pybind11;
using Clock = std::chrono::steady_clock;

namespace coexec {

namespace {

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
      keeps_arguments(d["keeps_arguments"].cast<bool>()),
      random(d["random"].cast<bool>()) {
  for (const auto& call : d["calls"].cast<py::list>()) calls.push_back(parse_instruction(call.cast<py::dict>()));
  for (const auto& n : d["numbers"].cast<std::vector<std::tuple<int64_t, size_t, std::string>>>()) {
    numbers.push_back({std::get<0>(n), std::get<1>(n), std::get<2>(n)});
  }
}

std::vector<c10::IValue> Recorded::fed(const py::list& given) const {
  std::vector<c10::IValue> out;
  for (const FedRegister& n : numbers) out.push_back(transformed(py::object(given[n.slot]).ptr(), n.transform));
  return out;
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
  begin_keeping();
  std::lock_guard<std::mutex> lock(mutex_);
  started_ = start;
}

std::vector<std::shared_ptr<Value>> Queue::run(
    std::shared_ptr<Recorded> recorded, std::vector<Operand> operands, std::vector<c10::IValue> numbers) {
  std::vector<std::shared_ptr<Value>> outputs;
  for (size_t i = 0; i < recorded->outputs.size(); ++i) outputs.push_back(std::make_shared<Value>());
  Item item{std::move(recorded), std::move(operands), std::move(numbers), outputs,
            ThreadState::capture(), at::sequence_number::peek()};
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
  wait_in_python(to_python_, lock, condition);
  done.swap(done_);
  uint64_t sequence = sequence_;
  lock.unlock();
  advance_sequence_to(sequence);
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
  let_pass();
  KeepsMemory keeps;
  while (!stop_) {
    auto began = Clock::now();
    while (sent_.load(std::memory_order_acquire) == ran_.load(std::memory_order_relaxed) && !stop_ &&
           Clock::now() - began < kSpin) {
      std::this_thread::yield();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    if (items_.empty() || !started_) {
      sleeping_ = true;
      wait_idly(to_queue_, lock, [this] { return stop_ || (!items_.empty() && started_); });
      sleeping_ = false;
    }
    if (stop_) return;
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
    to_python_.notify_all();
  }
}

std::vector<at::Tensor> Queue::execute(const Item& item) {
  if (item.thread_state != thread_state_) {
    item.thread_state.apply();
    thread_state_ = item.thread_state;
  }
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
    std::vector<c10::IValue> results = invoke(call, registers, {});
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
             return queue.run(recorded, {tensors.begin(), tensors.end()}, recorded->fed(numbers));
           })
      .def("wait", &Queue::wait)
      .def("drain", &Queue::drain)
      .def("ran", &Queue::ran)
      .def("record_spans", [](Queue& q, bool on) { q.spans().record(on); })
      .def("take_spans", [](Queue& q) { return q.spans().take(); })
      .def("times", &Queue::times);
}

}  // namespace coexec
