/// For ThreadSanitizer builds of tests that pass errors between threads. An exception's reference count lives
/// in libstdc++'s shared object, which is not instrumented: the sanitizer cannot see that the last owner
/// frees the exception after the others have let go of it, and reports its destruction as a race.
extern "C" const char* __tsan_default_suppressions();
extern "C" const char* __tsan_default_suppressions() {
  return "race:std::__exception_ptr::exception_ptr::_M_release\n";
}
