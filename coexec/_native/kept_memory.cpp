#include "kept_memory.h"

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

#if defined(__GLIBC__)
#include <malloc.h>
#endif

namespace coexec {

namespace {

// How much more than at their peak values may take together with what is kept, in percent.
constexpr size_t kSlack = 5;

// How much larger a piece of memory may be than what is asked for, in percent.
constexpr size_t kWaste = 12;

// For how many iterations a peak counts at least.
constexpr int kIterations = 16;

thread_local bool keeps = false;

std::atomic<int> borrowers{0};

// PyTorch's allocator, and before it, for threads that keep memory, the pieces that have been given back.
class KeptMemory final : public c10::Allocator {
 public:
  explicit KeptMemory(c10::Allocator* usual) : usual_(usual) {}

  c10::DataPtr allocate(size_t size) override;
  c10::DeleterFnPtr raw_deleter() const override { return usual_->raw_deleter() ? &free_raw : nullptr; }
  bool is_simple_data_ptr(const c10::DataPtr& pointer) const override { return usual_->is_simple_data_ptr(pointer); }
  void copy_data(void* dest, const void* src, std::size_t count) const override {
    usual_->copy_data(dest, src, count);
  }

  void begin();
  void give_back();
  std::pair<size_t, size_t> bytes();
  std::mutex& mutex() { return mutex_; }

 private:
  using Places = std::vector<void*>;
  using Dropped = std::vector<c10::DataPtr>;  // to be freed without the lock

  // oneDNN allocates and frees by this, without a word about whose memory it is.
  static void free_raw(void* data);
  static void put_back(void* data);

  void* take(size_t size);
  void add(c10::DataPtr memory, size_t size);
  bool put(void* data);
  void* remove(std::map<size_t, Places>::iterator place);
  void drop(std::map<size_t, Places>::iterator place, Dropped& dropped);

  c10::Allocator* usual_;
  std::mutex mutex_;
  struct Piece {
    c10::DataPtr memory;
    size_t size;
  };
  std::unordered_map<void*, Piece> pieces_;  // in use or not
  std::map<size_t, Places> unused_;          // by size
  size_t used_bytes_ = 0, unused_bytes_ = 0;
  size_t peak_ = 0, peak_before_ = 0;  // of the bytes in use, in this span of iterations and in the last one
  int iterations_ = 0;
};

// Lives as long as the process: PyTorch's storages hold it.
KeptMemory* memory = nullptr;

c10::DataPtr KeptMemory::allocate(size_t size) {
  if (!keeps || size == 0) return usual_->allocate(size);
  void* data = take(size);
  if (!data) {
    c10::DataPtr fresh = usual_->allocate(size);
    data = fresh.get();
    add(std::move(fresh), size);
  }
  return {data, data, &put_back, c10::Device(c10::DeviceType::CPU)};
}

// A piece that is as large, or not much larger; null if there is none.
void* KeptMemory::take(size_t size) {
  Dropped dropped;
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = unused_.lower_bound(size);
  void* data = nullptr;
  if (found != unused_.end() && found->first <= size + size * kWaste / 100) {
    used_bytes_ += found->first;
    data = remove(found);
    size = 0;
  }
  peak_ = std::max(peak_, used_bytes_ + size);
  size_t most = std::max(peak_, peak_before_);
  most += most * kSlack / 100;
  while (unused_bytes_ > 0 && used_bytes_ + size + unused_bytes_ > most) drop(std::prev(unused_.end()), dropped);
  return data;
}

void KeptMemory::add(c10::DataPtr fresh, size_t size) {
  std::lock_guard<std::mutex> lock(mutex_);
  void* data = fresh.get();
  pieces_.insert_or_assign(data, Piece{std::move(fresh), size});
  used_bytes_ += size;
}

void* KeptMemory::remove(std::map<size_t, Places>::iterator place) {
  void* data = place->second.back();
  place->second.pop_back();
  unused_bytes_ -= place->first;
  if (place->second.empty()) unused_.erase(place);
  return data;
}

void KeptMemory::drop(std::map<size_t, Places>::iterator place, Dropped& dropped) {
  auto piece = pieces_.find(remove(place));
  dropped.push_back(std::move(piece->second.memory));
  pieces_.erase(piece);
}

bool KeptMemory::put(void* data) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto piece = pieces_.find(data);
  if (piece == pieces_.end()) return false;
  size_t size = piece->second.size;
  used_bytes_ -= size;
  unused_bytes_ += size;
  unused_[size].push_back(data);
  return true;
}

void KeptMemory::put_back(void* data) { memory->put(data); }

void KeptMemory::free_raw(void* data) {
  if (!memory->put(data)) memory->usual_->raw_deallocate(data);
}

void KeptMemory::begin() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (++iterations_ < kIterations) return;
  iterations_ = 0;
  peak_before_ = std::exchange(peak_, used_bytes_);
}

void KeptMemory::give_back() {
  Dropped dropped;
  std::lock_guard<std::mutex> lock(mutex_);
  while (!unused_.empty()) drop(unused_.begin(), dropped);
}

std::pair<size_t, size_t> KeptMemory::bytes() {
  std::lock_guard<std::mutex> lock(mutex_);
  return {used_bytes_, unused_bytes_};
}

// PyTorch's allocator is replaced when memory is first kept.
void install() {
  static std::once_flag once;
  std::call_once(once, [] {
    memory = new KeptMemory(c10::GetCPUAllocator());
    c10::SetCPUAllocator(memory, /*priority=*/1);
#if defined(__unix__) || defined(__APPLE__)
    // A forked process has no thread that would unlock it.
    auto unlock = [] { memory->mutex().unlock(); };
    pthread_atfork([] { memory->mutex().lock(); }, unlock, unlock);
#endif
  });
}

}  // namespace

KeepsMemory::KeepsMemory() : before_(keeps) {
  install();
  keeps = true;
}

KeepsMemory::~KeepsMemory() { keeps = before_; }

BorrowsMemory::BorrowsMemory() { ++borrowers; }

BorrowsMemory::~BorrowsMemory() { --borrowers; }

void begin_keeping() {
  if (memory) memory->begin();
}

void give_memory_back() {
  if (memory) memory->give_back();
}

void give_idle_memory_back() {
  if (borrowers == 0) give_memory_back();
}

void trim_memory() {
#if defined(__GLIBC__)
  pybind11::gil_scoped_release release;
  malloc_trim(0);
#endif
}

void bind_kept_memory(pybind11::module_& m) {
  pybind11::class_<KeepsMemory>(m, "KeepsMemory").def(pybind11::init<>());
  pybind11::class_<BorrowsMemory>(m, "BorrowsMemory").def(pybind11::init<>());
  m.def("begin_keeping", &begin_keeping);
  m.def("give_memory_back", &give_memory_back);
  m.def("trim_memory", &trim_memory);
  m.def("kept_bytes", [] { return memory ? memory->bytes() : std::pair<size_t, size_t>(); });  // in use, and not
}

}  // namespace coexec
