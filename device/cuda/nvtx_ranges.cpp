#include "device/cuda/nvtx_ranges.h"

#include <string>

// Some packagings of the toolkit leave NVTX out.
#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>

namespace tranche::cuda::nvtx {
namespace {

/// The domain "tranche" in profilers; null while no profiler is attached.
nvtxDomainHandle_t domain() noexcept {
  static const nvtxDomainHandle_t handle = nvtxDomainCreateA("tranche");
  return handle;
}

nvtxEventAttributes_t named(const std::string& name) noexcept {
  nvtxEventAttributes_t attributes{};
  attributes.version = NVTX_VERSION;
  attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
  attributes.message.ascii = name.c_str();
  return attributes;
}

}  // namespace

bool attached() noexcept {
  return domain() != nullptr;
}

void push(std::string_view name) noexcept {
  if (!attached()) return;
  const std::string text(name);
  const nvtxEventAttributes_t attributes = named(text);
  nvtxDomainRangePushEx(domain(), &attributes);
}

void pop() noexcept {
  if (attached()) nvtxDomainRangePop(domain());
}

void PhaseRange::mark(std::string_view phase, std::string_view unit) noexcept {
  if (!attached()) return;
  end();
  if (phase == "idle") return;
  std::string text(phase);
  if (!unit.empty()) text.append(" ").append(unit);
  const nvtxEventAttributes_t attributes = named(text);
  range_ = nvtxDomainRangeStartEx(domain(), &attributes);
  open_ = true;
}

void PhaseRange::end() noexcept {
  if (open_) nvtxDomainRangeEnd(domain(), range_);
  open_ = false;
}

}  // namespace tranche::cuda::nvtx

#else

namespace tranche::cuda::nvtx {

bool attached() noexcept {
  return false;
}
void push(std::string_view) noexcept {}
void pop() noexcept {}
void PhaseRange::mark(std::string_view, std::string_view) noexcept {}
void PhaseRange::end() noexcept {
  open_ = false;
}

}  // namespace tranche::cuda::nvtx

#endif
