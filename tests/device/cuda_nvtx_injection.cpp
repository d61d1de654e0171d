// A profiler for tests: receives the NVTX ranges of the process that loads it, and returns them as lines.
#include <nvtx3/nvToolsExt.h>

#include <mutex>
#include <string>

namespace {

std::mutex mutex;
std::string lines;
std::string taken;
nvtxRangeId_t ranges = 0;

void add(const std::string& line) {
  const std::lock_guard lock(mutex);
  lines += line + "\n";
}

nvtxDomainHandle_t create_domain(const char* name) {
  add(std::string("domain ") + name);
  static int domain = 0;  // the handle's type has no definition, so any address serves
  return static_cast<nvtxDomainHandle_t>(static_cast<void*>(&domain));
}
int push(nvtxDomainHandle_t, const nvtxEventAttributes_t* attributes) {
  add(std::string("push ") + attributes->message.ascii);
  return 0;
}
int pop(nvtxDomainHandle_t) {
  add("pop");
  return 0;
}
nvtxRangeId_t start(nvtxDomainHandle_t, const nvtxEventAttributes_t* attributes) {
  const std::lock_guard lock(mutex);
  lines += "start " + std::to_string(++ranges) + " " + attributes->message.ascii + "\n";
  return ranges;
}
void end(nvtxDomainHandle_t, nvtxRangeId_t range) {
  add("end " + std::to_string(range));
}

template <class Function>
void* address_of(Function* function) {
  return reinterpret_cast<void*>(function);
}

}  // namespace

extern "C" {

/// The lines since the last call; valid until the next one.
__attribute__((visibility("default"))) const char* nvtx_log_take() {
  const std::lock_guard lock(mutex);
  taken.swap(lines);
  lines.clear();
  return taken.c_str();
}

__attribute__((visibility("default"))) int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t export_table) {
  const auto* const callbacks =
      static_cast<const NvtxExportTableCallbacks*>(export_table(NVTX_ETID_CALLBACKS));
  if (callbacks == nullptr) return 0;
  NvtxFunctionTable table = nullptr;
  unsigned int size = 0;
  if (callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size) == 0) return 0;
  const auto set = [&](unsigned int number, void* function) {
    if (number < size) *table[number] = reinterpret_cast<NvtxFunctionPointer>(function);
  };
  set(NVTX_CBID_CORE2_DomainCreateA, address_of(create_domain));
  set(NVTX_CBID_CORE2_DomainRangePushEx, address_of(push));
  set(NVTX_CBID_CORE2_DomainRangePop, address_of(pop));
  set(NVTX_CBID_CORE2_DomainRangeStartEx, address_of(start));
  set(NVTX_CBID_CORE2_DomainRangeEnd, address_of(end));
  return 1;
}
}
