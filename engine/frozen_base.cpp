#include "engine/frozen_base.h"

#include <cstring>
#include <filesystem>
#include <system_error>

#include "engine/adapter_base.h"
#include "engine/initial_weights.h"
#include "engine/rank_texts.h"
#include "engine/tensor_access.h"
#include "tranche/core/error.h"

namespace tranche::detail {

void FrozenBase::read_from(const std::string& folder) {
  // The path is absolute, so that a run started in another folder finds it.
  std::error_code failed;
  const std::filesystem::path whole = std::filesystem::absolute(folder, failed).lexically_normal();
  folder_ = failed ? folder : whole.string();
}

void FrozenBase::draw(std::uint64_t seed) {
  if (folder_.empty() && seed_ == seed) return;
  draw_frozen_weights(store_, config_, seed, runtime_.device(), runtime_.memory(Tier::host), workspace());
  folder_.clear();
  seed_ = seed;
}

std::string FrozenBase::digest() {
  if (simulated()) return {};
  if (!digest_) {
    TensorAccess access(store_, config_, runtime_.all(), runtime_.mesh(), runtime_.device(),
                        runtime_.memory(Tier::device), workspace(), runtime_.pipeline(), runtime_.tensor());
    digest_ = access.digest(TensorAccess::Digested::frozen_weights);
  }
  return to_text(*digest_);
}

checkpoint::BaseRecord FrozenBase::record() const {
  checkpoint::BaseRecord record{folder_, std::string(name_of(config_.precision.compute)),
                                digest_ ? to_text(*digest_) : "", std::nullopt};
  if (folder_.empty()) record.seed = static_cast<std::int64_t>(seed_);
  return record;
}

std::string FrozenBase::digest_in(DataType dtype, checkpoint::Reader* base) const {
  constexpr OperationLabel label{"checkpoint", "load", Traffic::control, Tier::host};
  const std::vector<std::string> shares = together(runtime_.all(), label, [&] {
    const AdapterBase values = base != nullptr ? AdapterBase(model_, *base) : AdapterBase(model_, seed_);
    const kernels::Digest share = values.digest(dtype, runtime_.rank(), runtime_.size());
    return std::string(reinterpret_cast<const char*>(&share), sizeof(share));
  });
  kernels::Digest sum;
  for (const std::string& text : shares) {
    kernels::Digest share;
    std::memcpy(&share, text.data(), sizeof(share));
    sum += share;
  }
  return to_text(sum);
}

void FrozenBase::require(const checkpoint::Manifest& adapters, const std::string& chosen,
                         checkpoint::Reader* base, std::vector<std::string>& notes) {
  const checkpoint::BaseRecord& wanted = *adapters.base;
  if (simulated()) return;
  if (wanted.digest.empty()) {
    notes.push_back(chosen +
                    " does not say which values the base of its adapters had: they were not compared");
    return;
  }
  const std::string found = wanted.dtype == name_of(config_.precision.compute)
                                ? digest()
                                : digest_in(parse_data_type(wanted.dtype), base);
  if (wanted.digest == found) return;
  const std::string has = folder_.empty() ? "that was drawn here" : folder_;
  throw CheckpointError(
      chosen + " holds adapters that were trained beside another base: its digest was " + wanted.digest +
      (wanted.folder.empty() ? " (drawn, not loaded: the seed tells which; tranche.lora.save_base saves it)"
                             : " (" + wanted.folder + ")") +
      ", the base " + has + " has " + found + "; give the base that it belongs to (--base)");
}

}  // namespace tranche::detail
