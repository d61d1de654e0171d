#pragma once
/// The instruction set that the vector loops run on.

#include <string>
#include <string_view>
#include <vector>

namespace tranche::kernels::cpu {

/// Instruction sets that this build has loops for and this machine can run, best first: "AVX3", "AVX2" ...
std::vector<std::string> instruction_sets();
/// The one in use.
std::string instruction_set();

/// While alive, kernels of the whole process use one instruction set; for tests, which compare them.
class InstructionSetForTest {
 public:
  /// Throws InvalidArgument when `name` is none of instruction_sets().
  explicit InstructionSetForTest(std::string_view name);
  ~InstructionSetForTest();
  InstructionSetForTest(const InstructionSetForTest&) = delete;
  InstructionSetForTest& operator=(const InstructionSetForTest&) = delete;
};

}  // namespace tranche::kernels::cpu
