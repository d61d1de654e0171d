#include "kernels/cpu/isolated_library.h"

#include <gmock/gmock.h>

#include <string>

#include "kernels/cpu/product_probe.h"
#include "tests/core/error_text.h"

namespace tranche::kernels::cpu {
namespace {

using test::message_of;
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(IsolatedLibrary, FindsFunctionsOfTheFirstThatIsThere) {
  const IsolatedLibrary library({"/nonexistent/libm.so.6", "libm.so.6"}, "the C library");
  double (*root)(double) = nullptr;
  library.find(root, "sqrt");
  EXPECT_EQ(root(49), 7);
}

TEST(IsolatedLibrary, SaysWhatIsMissingAndWhatToInstall) {
  EXPECT_THAT(
      message_of<ConfigurationError>([] {
        const IsolatedLibrary none({"/nonexistent/a.so", "libnothing.so.7"},
                                   "Nothing 7 (Debian: libnothing-dev)");
      }),
      AllOf(HasSubstr("install Nothing 7 (Debian: libnothing-dev), or build with TRANCHE_PLAIN_KERNELS"),
            HasSubstr("/nonexistent/a.so: cannot open"), HasSubstr("libnothing.so.7: cannot open")));
  EXPECT_THAT(message_of<ConfigurationError>([] {
                const IsolatedLibrary library({"libm.so.6"}, "the C library");
                void (*function)() = nullptr;
                library.find(function, "no_such_function");
              }),
              HasSubstr("libm.so.6 has no function no_such_function, so it is not of the version"));
}

TEST(ProductProbe, AcceptsWhatIsRightAndNamesTheCauseOfWhatIsNot) {
  const auto multiply = [](float change) {
    return [change](const float* a, const float* b, float* c, std::int64_t n) {
      for (std::int64_t i = 0; i < n; ++i) {
        for (std::int64_t j = 0; j < n; ++j) {
          for (std::int64_t k = 0; k < n; ++k) c[i * n + j] += a[i * n + k] * b[k * n + j];
        }
      }
      c[n * n - 1] += change;
      return true;
    };
  };
  EXPECT_EQ(message_of<Error>([&] { probe_product("Some BLAS", multiply(0)); }), test::nothing_thrown);
  EXPECT_THAT(
      message_of<Error>([&] { probe_product("Some BLAS", multiply(1)); }),
      AllOf(HasSubstr(
                "Some BLAS multiplies wrongly in this process: another library that was loaded has symbols"),
            HasSubstr("LD_DEBUG=bindings")));
  EXPECT_THAT(message_of<Error>([&] {
                probe_product("Some BLAS",
                              [](const float*, const float*, float*, std::int64_t) { return false; });
              }),
              HasSubstr("Some BLAS refuses a product that it should support in this process"));
}

}  // namespace
}  // namespace tranche::kernels::cpu
