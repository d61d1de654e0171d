#include <gtest/gtest.h>

#include "tranche/comm/backends.h"
#include "tranche/core/error.h"

#ifdef TRANCHE_TEST_WITHOUT_MPI
namespace tranche {
namespace {

TEST(MpiStub, NamesTheOptionThatAddsMpi) {
  try {
    make_mpi_communicator();
    FAIL() << "nothing was thrown";
  } catch (const NotCompiled& error) {
    EXPECT_EQ(error.message(), "Open MPI is not part of this build; configure with -DTRANCHE_MPI=ON");
  }
  EXPECT_EQ(mpi_version(), "not compiled");
}

}  // namespace
}  // namespace tranche
#endif
