#pragma once
/// Linked into every test program of the label gpu: a listener that ends the program, with a status of its
/// own and a line that names the case, when nothing that follows could be believed.

#include <string>

namespace tranche::test {

/// After a case that left a CUDA error which stays (an illegal address, say): the context is lost, and every
/// later case of the process would fail.
inline constexpr int status_after_fault = 97;
/// When one case takes longer than TRANCHE_TEST_CASE_SECONDS (unset: cases may take any time).
inline constexpr int status_after_hang = 98;

/// The lasting error of the CUDA context, "" when there is none. Waits for everything issued to the
/// calling thread's GPU. An error that the runtime reports once and forgets does not count.
std::string lasting_cuda_error();

}  // namespace tranche::test
