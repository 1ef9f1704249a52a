#include "runner.h"

#include "bypass.h"
#include "dispatch_keys.h"
#include "draws.h"
#include "float_control.h"
#include "kept_memory.h"
#include "kernel_threads.h"
#include "layout.h"
#include "waiting.h"

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/ScalarOps.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <iostream>
#include <unordered_set>

namespace py = pybind11;
using Clock = std::chrono::steady_clock;

namespace coexec {

ThreadState ThreadState::capture() {
  ThreadState state;
  state.num_threads = at::get_num_threads();
  state.float_control = coexec::float_control();
  if (at::hasCUDA()) {
    c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
    state.stream = guard.getStream(guard.getDevice());
  }
  return state;
}

void ThreadState::apply() const {
  at::set_num_threads(num_threads);
  set_float_control(float_control);
  if (stream) {
    c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
    guard.setDevice(stream->device());
    guard.exchangeStream(*stream);
  }
}

Runner*& Runner::current() {
  static thread_local Runner* runner = nullptr;
  return runner;
}

Worker::Worker() : thread_([this] { loop(); }) {}

Worker::~Worker() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  py::gil_scoped_release release;
  thread_.join();
}

void Worker::execute(Runner& runner) {
  std::lock_guard<std::mutex> lock(mutex_);
  waiting_.push_back(&runner);
  changed_.notify_one();
}

void Worker::forget(Runner& runner) {
  py::gil_scoped_release release;
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return running_ != &runner; });
}

void Worker::loop() {
  at::init_num_threads();
  let_pass();
  KeepsMemory keeps;
  std::optional<PassiveWorkers> passive;
  auto idle = [&] {
    passive.reset();
    leave_to_others();
  };
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    wait_idly(changed_, lock, [this] { return stop_ || !waiting_.empty(); }, idle);
    if (stop_) return;
    running_ = waiting_.front();
    waiting_.pop_front();
    lock.unlock();
    if (running_->leaves_processors() && !passive) passive.emplace();
    running_->run();
    lock.lock();
    running_ = nullptr;
    changed_.notify_all();
  }
}

Runner::Runner(std::shared_ptr<Worker> worker) : work_([this] { wake_python(); }), worker_(std::move(worker)) {}

Runner::~Runner() {
  cancel();
  worker_->forget(*this);
}

void Runner::begin(std::shared_ptr<Program> program, std::vector<at::Tensor> captured, bool start) {
  if (program->threads == 0) release_kernel_threads();  // this thread will wait, not compute
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(state_ == State::Idle, "an iteration is still running on this GraphRunner");
  program_ = std::move(program);
  registers_.assign(program_->register_count, c10::IValue());
  TORCH_CHECK(captured.size() == program_->captured.size(), "captured tensors do not fit the program");
  for (size_t i = 0; i < captured.size(); ++i) registers_[program_->captured[i]] = std::move(captured[i]);
  published_.assign(program_->fetch_slots, std::nullopt);
  symbols_.assign(program_->symbols, std::nullopt);
  known_ = symbols_;
  cancelled_ = false;
  committed_ = computed_ = committing_ = drawn_ = false;
  error_ = nullptr;
  deferred_.clear();
  available_ = 0;
  taken_ = 0;
  thread_state_ = ThreadState::capture();
  state_ = State::Ready;
  if (start) start_locked();
}

void Runner::start() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (state_ == State::Ready) start_locked();
}

void Runner::start_locked() {
  state_ = State::Running;
  worker_->execute(*this);
}

void Runner::send(c10::IValue message) {
  std::lock_guard<std::mutex> lock(mutex_);
  messages_.push_back(std::move(message));
  available_.fetch_add(1, std::memory_order_release);
  if (graph_waits_) to_graph_.notify_one();
}

void Runner::bind(int64_t symbol, int64_t value) {
  std::lock_guard<std::mutex> lock(mutex_);
  symbols_.at(symbol) = value;
  if (graph_waits_) to_graph_.notify_one();
}

std::optional<int64_t> Runner::bound(int64_t symbol) const { return symbols_.at(symbol); }

void Runner::tell_python() {
  told_.fetch_add(1, std::memory_order_release);
  to_python_.notify_all();
}

void Runner::wake_python() {
  if (sleepers_.load(std::memory_order_seq_cst) == 0) return;
  std::lock_guard<std::mutex> lock(mutex_);
  to_python_.notify_all();
}

template <typename Condition>
void Runner::wait_and_help(std::unique_lock<std::mutex>& lock, Condition condition, Signals signals) {
  if (condition()) return;
  auto look_for = program_ && program_->helped ? kBetweenKernels : std::chrono::microseconds(0);
  lock.unlock();
  {
    py::gil_scoped_release release;
    std::optional<Helping> helping;
    auto checked = Clock::now();
    while (true) {
      uint32_t told = told_.load(std::memory_order_acquire), offered = work_.offered();
      auto changed = [&] { return told_.load(std::memory_order_acquire) != told || work_.offered() != offered; };
      lock.lock();
      bool ready = condition();
      lock.unlock();
      if (ready) break;
      auto prepare = [&](unsigned int float_control) {
        if (!helping) helping.emplace(float_control);
      };
      while (told_.load(std::memory_order_acquire) == told && work_.take(prepare)) {}
      if (!look(look_for, changed)) {
        lock.lock();
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        to_python_.wait_for(lock, kSignals, changed);
        sleepers_.fetch_sub(1, std::memory_order_relaxed);
        lock.unlock();
      }
      if (signals == Signals::Wait || Clock::now() - checked < kSignals) continue;
      helping.reset();
      py::gil_scoped_acquire acquire;
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
      checked = Clock::now();
    }
  }
  lock.lock();
}

void Runner::share(int parts, SharedWork::Body body, void* data) {
  Runner* runner = current();
  if (runner && runner->program_->helped) return runner->work_.run(parts, body, data);
  for (int part = 0; part < parts; ++part) body(data, part);
}

c10::IValue Runner::fetch(int64_t slot) {
  start();
  std::unique_lock<std::mutex> lock(mutex_);
  wait_and_help(lock, [&] { return published_.at(slot).has_value() || state_ == State::Done; });
  if (!published_[slot]) {
    if (error_) std::rethrow_exception(error_);
    TORCH_CHECK(false, "the GraphRunner ended without publishing the value");
  }
  return *published_[slot];
}

void Runner::commit() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    committed_ = true;
    committing_ = computed_ && !cancelled_;  // what can fail before it is done
  }
  to_graph_.notify_one();
  start();
}

bool Runner::wait_for_commit() {
  std::unique_lock<std::mutex> lock(mutex_);
  wait_and_help(lock, [this] { return committing_ || state_ == State::Done; });
  return committing_;
}

void Runner::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  wait_and_help(lock, [this] { return state_ == State::Done; });
  if (error_) std::rethrow_exception(error_);
}

void Runner::join() {
  std::unique_lock<std::mutex> lock(mutex_);
  wait_and_help(lock, [this] { return state_ != State::Running; }, Signals::Wait);
}

bool Runner::wait_for_draws() {
  std::unique_lock<std::mutex> lock(mutex_);
  wait_and_help(lock, [this] { return drawn_ || state_ != State::Running; }, Signals::Wait);
  return state_ == State::Running;
}

void Runner::cancel() {
  std::unique_lock<std::mutex> lock(mutex_);
  cancelled_ = true;
  to_graph_.notify_one();
  if (state_ == State::Ready) state_ = State::Done;
  wait_and_help(lock, [this] { return state_ != State::Running; }, Signals::Wait);
}

bool Runner::committing() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return committing_;
}

void Runner::finish() {
  std::vector<c10::IValue> registers, kept;
  std::deque<c10::IValue> messages;
  std::vector<std::optional<c10::IValue>> published;
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(state_ != State::Running, "the GraphRunner is still running");
  registers.swap(registers_);
  kept.swap(kept_);
  messages.swap(messages_);
  published.swap(published_);
  error_ = nullptr;
  state_ = State::Idle;
}

c10::IValue Runner::receive() {
  auto began = Clock::now();
  while (available_.load(std::memory_order_acquire) == taken_ && !cancelled_ &&
         Clock::now() - began < kSpin) {
    std::this_thread::yield();
  }
  std::unique_lock<std::mutex> lock(mutex_);
  if (messages_.empty() && !cancelled_) {
    graph_waits_ = true;
    to_graph_.wait(lock, [this] { return cancelled_ || !messages_.empty(); });
    graph_waits_ = false;
  }
  stall_s_ += seconds_since(began);
  spans_.add(began, true);
  if (cancelled_) throw Cancelled{};
  kept_.push_back(std::move(messages_.front()));
  messages_.pop_front();
  ++taken_;
  return kept_.back();
}

int64_t Runner::size(int64_t symbol) {
  if (known_[symbol]) return *known_[symbol];
  auto began = Clock::now();
  std::unique_lock<std::mutex> lock(mutex_);
  graph_waits_ = true;
  to_graph_.wait(lock, [&] { return cancelled_ || symbols_[symbol]; });
  graph_waits_ = false;
  stall_s_ += seconds_since(began);
  spans_.add(began, true);
  if (cancelled_) throw Cancelled{};
  return *(known_[symbol] = symbols_[symbol]);
}

void Runner::publish(int64_t slot, c10::IValue value) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (cancelled_) throw Cancelled{};
  published_.at(slot) = std::move(value);
  tell_python();
}

bool Runner::leaves_processors() const { return program_->threads > 0; }

void Runner::run() {
  current() = this;
  thread_state_.apply();
  // Operators that are made of Python code meet tensors here whose use waits for this very thread.
  at::impl::PythonTorchFunctionTLS::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED);
  begin_keeping();
  if (leaves_processors()) limit_kernel_threads(program_->threads);
  auto t = Clock::now();
  double stalled = stall_s_;
  std::exception_ptr error;
  try {
    at::AutoGradMode no_grad(false);
    execute();
  } catch (const Cancelled&) {
  } catch (...) {
    error = std::current_exception();
  }
  std::lock_guard<std::mutex> lock(mutex_);
  busy_s_ += seconds_since(t) - (stall_s_ - stalled);
  spans_.add(t, false);
  error_ = error;
  state_ = State::Done;
  tell_python();
}

void Runner::execute() {
  size_t pc = 0;
  const auto& code = program_->instructions;
  bool drawn = false;
  while (pc < code.size()) {
    if (!drawn && pc >= program_->draws_until) {
      std::lock_guard<std::mutex> lock(mutex_);
      drawn = drawn_ = true;
      tell_python();
    }
    const Instruction& instruction = code[pc];
    size_t next = pc + 1;
    switch (instruction.opcode) {
      case Opcode::Call:
        if (instruction.when != When::Now) {
          deferred_.push_back(&instruction);
        } else {
          c10::impl::ExcludeDispatchKeyGuard guard(kAutogradAndViews);
          if (instruction.bernoulli) {
            draw(instruction);
          } else {
            call(instruction);
          }
        }
        break;
      case Opcode::Feed:
        if (instruction.when != When::Now) {
          deferred_.push_back(&instruction);
        } else {
          registers_[instruction.outs[0]] = receive();
        }
        break;
      case Opcode::Fetch: {
        const c10::IValue& value = registers_[instruction.ins[0]];
        if (instruction.copy && value.isTensor()) {
          publish(instruction.slot, copied(value.toTensor()));
        } else {
          publish(instruction.slot, value);
        }
        break;
      }
      case Opcode::Move:
        for (size_t i = 0; i < instruction.ins.size(); ++i) {
          registers_[instruction.outs[i]] = registers_[instruction.ins[i]];
        }
        break;
      case Opcode::Switch:
        next = instruction.targets.at(receive().toInt());
        break;
      case Opcode::Jump:
        next = instruction.targets[0];
        break;
      case Opcode::Compiled:
        if (instruction.when != When::Now) {
          deferred_.push_back(&instruction);
        } else {
          compiled(instruction);
        }
        break;
      case Opcode::Commit: {
        if (program_->branches) check_deferred();
        {
          std::unique_lock<std::mutex> lock(mutex_);
          auto t = Clock::now();
          computed_ = true;
          to_graph_.wait(lock, [this] { return cancelled_ || committed_; });
          stall_s_ += seconds_since(t);
          spans_.add(t, true);
          if (cancelled_) throw Cancelled{};
          committing_ = true;
          tell_python();
        }
        // In-place writes to tensors of the user have to raise their version counters.
        c10::impl::ExcludeDispatchKeyGuard guard(kAutograd);
        for (When round : {When::Commit, When::CommitLast}) {
          for (const Instruction* deferred : deferred_) {
            if (deferred->when != round) continue;
            if (deferred->opcode == Opcode::Feed) {
              registers_[deferred->outs[0]] = receive();
            } else if (deferred->opcode == Opcode::Compiled) {
              compiled(*deferred);
            } else {
              call(*deferred);
            }
          }
        }
        break;
      }
    }
    for (int64_t reg : instruction.release) registers_[reg] = c10::IValue();
    pc = next;
    if (cancelled_) throw Cancelled{};
  }
}

void Runner::check_deferred() const {
  std::unordered_set<int64_t> defined;
  for (const Instruction* deferred : deferred_) {
    if (deferred->when == When::CommitLast) continue;
    for (int64_t reg : deferred->ins) {  // of a compiled block
      TORCH_CHECK(!registers_[reg].isNone() || defined.count(reg),
                  "a compiled block would read a value of another path at the commit");
    }
    for (const Argument& argument : deferred->arguments) {
      bool empty = argument.reads([&](int64_t reg) { return registers_[reg].isNone() && !defined.count(reg); });
      TORCH_CHECK(!empty, deferred->op->schema().name(), " (from ", deferred->where,
                  ") would read a value of another path at the commit");
    }
    for (int64_t out : deferred->outs) defined.insert(out);
  }
}

void Runner::draw(const Instruction& instruction) {
  at::Tensor tensor = registers_[instruction.arguments[0].reg].toTensor();
  draw_bernoulli(tensor, instruction.arguments[1].constant.toDouble());
  if (instruction.outs[0] >= 0) registers_[instruction.outs[0]] = tensor;
}

void Runner::call(const Instruction& instruction) {
  if (instruction.when == When::CommitLast && registers_[instruction.arguments[0].reg].isNone()) {
    return;  // the tensor was not bound on this path
  }
  Symbols symbols = [this](int64_t s) -> std::optional<int64_t> { return size(s); };
  std::vector<c10::IValue> results;
  try {
    results = invoke(instruction, registers_, symbols);
  } catch (const Cancelled&) {
    throw;
  } catch (const c10::Error& e) {
    throw std::runtime_error(
        instruction.op->schema().name() + " failed in the GraphRunner (from " + instruction.where +
        "): " + e.what_without_backtrace());
  } catch (const std::exception& e) {
    throw std::runtime_error(
        instruction.op->schema().name() + " failed in the GraphRunner (from " + instruction.where + "): " + e.what());
  }
  if (instruction.outs.empty()) return;
  TORCH_CHECK(results.size() == instruction.outs.size(), instruction.op->schema().name(), " (from ", instruction.where,
              ") returned ", results.size(), " values where ", instruction.outs.size(), " were recorded");
  for (size_t i = 0; i < results.size(); ++i) {
    if (instruction.outs[i] < 0) continue;
    if (i < instruction.shapes.size() && instruction.shapes[i] && results[i].isTensor()) {
      // A value that decides about a shape would show here, and nowhere else.
      TORCH_CHECK(are(*instruction.shapes[i], results[i].toTensor().sizes(), symbols), instruction.op->schema().name(),
                  " (from ", instruction.where, ") gave shape ", results[i].toTensor().sizes(),
                  ", and traces had another one");
    }
    registers_[instruction.outs[i]] = std::move(results[i]);
  }
}

namespace {

// Whether strides are these where they say where an element is.
bool has_strides(const at::Tensor& tensor, const std::vector<int64_t>& strides) {
  if (tensor.numel() == 0) return true;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) > 1 && tensor.stride(d) != strides[d]) return false;
  }
  return true;
}

}  // namespace

void Runner::compiled(const Instruction& instruction) {
  c10::impl::ExcludeDispatchKeyGuard guard(kAutogradAndViews);
  std::vector<at::Tensor> inputs;
  inputs.reserve(instruction.ins.size() + instruction.symbols.size() + 1);
  inputs.push_back(at::zeros({1}));  // the token that orders feeds and fetches
  for (int64_t symbol : instruction.symbols) inputs.push_back(at::zeros({1}).expand({size(symbol)}));
  for (int64_t reg : instruction.ins) {
    const c10::IValue& value = registers_[reg];
    inputs.push_back(value.isTensor() ? value.toTensor() : c10::scalar_to_tensor(value.toScalar()));
  }
  Symbols symbols = [this](int64_t s) -> std::optional<int64_t> { return size(s); };
  for (size_t i = 0; i < instruction.given.size(); ++i) {
    const Given& given = instruction.given[i];
    const at::Tensor& input = inputs[inputs.size() - instruction.ins.size() + i];
    TORCH_CHECK(are(given.shape, input.sizes(), symbols) && (!given.strides || has_strides(input, *given.strides)) &&
                    static_cast<int64_t>(input.scalar_type()) == given.dtype,
                "a compiled block is given ", input.scalar_type(), " ", input.sizes(), " with strides ", input.strides(),
                ", and was made for something else");
  }
  std::vector<at::Tensor> outputs;
  try {
    outputs = instruction.library->run(inputs);
  } catch (...) {
    if (cancelled_) std::cerr.clear();  // the operator that feeds has silenced it
    throw;
  }
  // In-place writes to tensors of the user have to raise their version counters.
  for (int64_t reg : instruction.written) {
    const at::Tensor& tensor = registers_[reg].toTensor();
    if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  }
  TORCH_CHECK(outputs.size() == instruction.outs.size(), "a compiled block returned ", outputs.size(),
              " values where ", instruction.outs.size(), " were expected");
  std::unordered_set<c10::StorageImpl*> given;
  for (const at::Tensor& input : inputs) given.insert(input.storage().unsafeGetStorageImpl());
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (instruction.outs[i] < 0) continue;
    bool is_typed = instruction.dtypes[i] < 0 || static_cast<int64_t>(outputs[i].scalar_type()) == instruction.dtypes[i];
    TORCH_CHECK(is_typed, "a compiled block gave a value of type ",
                outputs[i].scalar_type(), ", and traces had another one");
    // A compiler may return an input for what adds nothing to it, and the program may write that input later on.
    if (given.count(outputs[i].storage().unsafeGetStorageImpl())) outputs[i] = copied_anywhere(outputs[i]);
    TORCH_CHECK(!instruction.strides[i] || has_strides(outputs[i], *instruction.strides[i]),
                "a compiled block gave strides ", outputs[i].strides(), ", and traces had others");
    if (instruction.strides[i] && outputs[i].strides() != at::IntArrayRef(*instruction.strides[i])) {
      // They differ where a dimension has one element, which Python may see.
      outputs[i] = outputs[i].as_strided(outputs[i].sizes(), *instruction.strides[i], outputs[i].storage_offset());
    }
    TORCH_CHECK(!instruction.shapes[i] || are(*instruction.shapes[i], outputs[i].sizes(), symbols),
                "a compiled block gave shape ", outputs[i].sizes(), ", and traces had another one");
    registers_[instruction.outs[i]] = std::move(outputs[i]);
  }
}

}  // namespace coexec
