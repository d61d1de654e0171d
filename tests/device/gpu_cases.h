#pragma once
/// Linked into every test program with the label gpu: a listener that ends the program when later results
/// could not be trusted, with a status of its own and a line that names the case.

#include <string>

namespace tranche::test {

/// The status after a case that left a sticky CUDA error (such as an illegal address): the context is lost,
/// and every later case of the process would fail.
inline constexpr int status_after_fault = 97;
/// The status if one case takes longer than TRANCHE_TEST_CASE_SECONDS (unset: no limit).
inline constexpr int status_after_hang = 98;

/// The sticky error of the CUDA context, or "". Waits for all work on the calling thread's GPU. An error that
/// the runtime returns once and clears does not count.
std::string lasting_cuda_error();

}  // namespace tranche::test
