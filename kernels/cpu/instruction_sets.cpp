#include "kernels/cpu/instruction_sets.h"

#include "tranche/core/error.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/instruction_sets.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace tranche::kernels::cpu::HWY_NAMESPACE {
const char* name_in_use() {
  return hwy::TargetName(HWY_TARGET);
}
}  // namespace tranche::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tranche::kernels::cpu {

HWY_EXPORT(name_in_use);

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const std::int64_t target : hwy::SupportedAndGeneratedTargets()) {
    names.emplace_back(hwy::TargetName(target));
  }
  return names;
}

std::string instruction_set() {
  return HWY_DYNAMIC_DISPATCH(name_in_use)();
}

InstructionSetForTest::InstructionSetForTest(std::string_view name) {
  std::string known;
  for (const std::int64_t target : hwy::SupportedAndGeneratedTargets()) {
    if (hwy::TargetName(target) == name) {
      hwy::SetSupportedTargetsForTest(target);
      hwy::GetChosenTarget().Update(hwy::SupportedTargets());
      return;
    }
    known += known.empty() ? "" : ", ";
    known += hwy::TargetName(target);
  }
  throw InvalidArgument("instruction set " + std::string(name) + " cannot run here; can: " + known);
}

InstructionSetForTest::~InstructionSetForTest() {
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

}  // namespace tranche::kernels::cpu
#endif
