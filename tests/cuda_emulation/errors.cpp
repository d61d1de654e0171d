// Errors, their injection, and counts of calls.
#include <fmt/format.h>

#include <array>
#include <cstdlib>
#include <map>

#include "tests/cuda_emulation/control.h"
#include "tests/cuda_emulation/state.h"

namespace cuda_emulation {
namespace {

constexpr int most_devices = 16;

struct Injection {
  int remaining = 0;
  int error = 0;
};

struct Book {
  std::mutex mutex;
  std::map<std::string, Injection, std::less<>> injections;
  std::map<std::string, std::int64_t, std::less<>> calls;
  std::string diagnostic;
  std::array<std::atomic<int>, most_devices> sticky{};
  std::atomic<std::int64_t> launches{0}, graph_launches{0}, host_waits{0}, spinning_waits{0}, allocations{0},
      copies{0};
  std::atomic<std::uint64_t> seed{static_cast<std::uint64_t>(environment("TRANCHE_EMULATION_SEED", 1))};
  std::atomic<int> delay{static_cast<int>(environment("TRANCHE_EMULATION_DELAY", 0))};
};

// This is never destroyed, because threads of streams may outlive main().
Book& book() {
  static Book& instance = *new Book;
  return instance;
}

thread_local cudaError_t last_error = cudaSuccess;

}  // namespace

std::int64_t environment(const char* name, std::int64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr || *text == '\0' ? otherwise : std::strtoll(text, nullptr, 10);
}

int begin_call(const char* name, int not_permitted, bool sticky_applies) {
  Book& b = book();
  {
    std::lock_guard lock(b.mutex);
    const auto counted = b.calls.find(name);
    if (counted == b.calls.end()) {
      b.calls.emplace(name, 1);
    } else {
      ++counted->second;
    }
    if (!b.injections.empty()) {
      if (auto found = b.injections.find(name); found != b.injections.end()) {
        if (--found->second.remaining == 0) {
          const int error = found->second.error;
          b.injections.erase(found);
          return error;
        }
      }
    }
  }
  if (inside_host_function()) {
    misuse(cudaErrorNotPermitted, fmt::format("{} was called from a host function of a stream", name));
    return not_permitted;
  }
  return sticky_applies ? static_cast<int>(sticky_error(current_device())) : 0;
}

cudaError_t end_call(cudaError_t error) {
  if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
  return error;
}

cudaError_t misuse(cudaError_t error, const std::string& what) {
  fmt::print(stderr, "cuda_emulation: {}\n", what);
  std::lock_guard lock(book().mutex);
  book().diagnostic = what;
  return error;
}

void fail_device(int device, cudaError_t error, const std::string& what) {
  misuse(error, fmt::format("{} (TRANCHE_EMULATION_SEED={})", what, seed()));
  int none = 0;
  book().sticky[static_cast<std::size_t>(device)].compare_exchange_strong(none, static_cast<int>(error));
}

cudaError_t sticky_error(int device) {
  return static_cast<cudaError_t>(book().sticky[static_cast<std::size_t>(device)].load());
}

void count_host_wait() {
  ++book().host_waits;
}
void count_spinning_wait() {
  ++book().spinning_waits;
}
void count_launch() {
  ++book().launches;
}
void count_graph_launch() {
  ++book().graph_launches;
}
void count_allocation() {
  ++book().allocations;
}
void count_copy() {
  ++book().copies;
}
std::uint64_t seed() {
  return book().seed;
}
int delay_microseconds() {
  return book().delay;
}

void fail_call(const std::string& function, int nth, int error) {
  std::lock_guard lock(book().mutex);
  book().injections[function] = {nth, error};
}

void forget_failures() {
  std::lock_guard lock(book().mutex);
  book().injections.clear();
}

Counters counters() {
  const Book& b = book();
  return {b.launches,    b.graph_launches, b.host_waits,  b.spinning_waits,
          b.allocations, b.copies,         most_pending()};
}

std::int64_t calls(const std::string& function) {
  std::lock_guard lock(book().mutex);
  const auto found = book().calls.find(function);
  return found == book().calls.end() ? 0 : found->second;
}

void reset_counters() {
  Book& b = book();
  std::lock_guard lock(b.mutex);
  b.calls.clear();
  reset_most_pending();
  b.launches = b.graph_launches = b.host_waits = b.spinning_waits = b.allocations = b.copies = 0;
}

std::string last_diagnostic() {
  std::lock_guard lock(book().mutex);
  return book().diagnostic;
}

void recover() {
  for (auto& sticky : book().sticky) sticky = 0;
  last_error = cudaSuccess;
  std::lock_guard lock(book().mutex);
  book().diagnostic.clear();
}

void set_seed(std::uint64_t value) {
  book().seed = value;
}
void set_delay(int microseconds) {
  book().delay = microseconds;
}

}  // namespace cuda_emulation

cudaError_t cudaGetLastError() {
  using namespace cuda_emulation;
  const cudaError_t sticky = sticky_error(current_device());
  const cudaError_t error = sticky != cudaSuccess ? sticky : last_error;
  last_error = cudaSuccess;
  return error;
}

cudaError_t cudaPeekAtLastError() {
  using namespace cuda_emulation;
  const cudaError_t sticky = sticky_error(current_device());
  return sticky != cudaSuccess ? sticky : last_error;
}

namespace {

struct ErrorText {
  cudaError_t error;
  const char* name;
  const char* text;
};

constexpr ErrorText error_texts[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver",
     "CUDA driver version is insufficient for CUDA runtime version"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorLaunchOutOfResources, "cudaErrorLaunchOutOfResources",
     "too many resources requested for launch"},
    {cudaErrorHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered",
     "part or all of the requested memory range is already mapped"},
    {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered",
     "pointer does not correspond to a registered memory region"},
    {cudaErrorNotPermitted, "cudaErrorNotPermitted", "operation not permitted"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
    {cudaErrorStreamCaptureUnmatched, "cudaErrorStreamCaptureUnmatched",
     "capture was not ended in the same stream as it began"},
    {cudaErrorStreamCaptureUnjoined, "cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"},
    {cudaErrorStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation",
     "dependency created on uncaptured work in another stream"},
    {cudaErrorStreamCaptureImplicit, "cudaErrorStreamCaptureImplicit",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {cudaErrorCapturedEvent, "cudaErrorCapturedEvent",
     "operation not permitted on an event last recorded in a capturing stream"},
    {cudaErrorStreamCaptureWrongThread, "cudaErrorStreamCaptureWrongThread",
     "attempt to terminate a thread-local capture sequence from another thread"},
    {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
};

const ErrorText* look_up(cudaError_t error) {
  for (const ErrorText& each : error_texts) {
    if (each.error == error) return &each;
  }
  return nullptr;
}

}  // namespace

const char* cudaGetErrorString(cudaError_t error) {
  const ErrorText* found = look_up(error);
  return found != nullptr ? found->text : "unrecognized error code";
}

const char* cudaGetErrorName(cudaError_t error) {
  const ErrorText* found = look_up(error);
  return found != nullptr ? found->name : "unrecognized error code";
}
