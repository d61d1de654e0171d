#pragma once
/// The instruction set of the vector loops.

#include <string>
#include <string_view>
#include <vector>

namespace tranche::kernels::cpu {

/// The instruction sets for which this build has loops and which this machine can run, best first: "AVX3",
/// "AVX2" ...
std::vector<std::string> instruction_sets();
/// The instruction set in use.
std::string instruction_set();

/// During its lifetime, kernels of the whole process use one instruction set; for tests, which compare them.
class InstructionSetForTest {
 public:
  /// Throws InvalidArgument when `name` is not in instruction_sets().
  explicit InstructionSetForTest(std::string_view name);
  ~InstructionSetForTest();
  InstructionSetForTest(const InstructionSetForTest&) = delete;
  InstructionSetForTest& operator=(const InstructionSetForTest&) = delete;
};

}  // namespace tranche::kernels::cpu
