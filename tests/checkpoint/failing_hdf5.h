#pragma once
/// Makes HDF5 refuse a call of this process. The executable defines the functions that it may refuse, and
/// they pass every other call on to the library.

#include <string>

namespace tranche::testing {

/// While it lives, the given call of a function is refused: the library is called with an invalid id, so that
/// the reason in its error stack is its own. One object at a time.
class FailingHdf5 {
 public:
  /// `function` is H5Dcreate2, H5Lcreate_soft or H5Pset_virtual; `call` counts its calls from 1.
  FailingHdf5(const std::string& function, int call);
  ~FailingHdf5();
  FailingHdf5(const FailingHdf5&) = delete;
  FailingHdf5& operator=(const FailingHdf5&) = delete;
  /// True if the call was made and refused.
  bool refused() const;
};

}  // namespace tranche::testing
