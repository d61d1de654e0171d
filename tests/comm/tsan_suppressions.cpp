/// For ThreadSanitizer builds of tests that pass errors between threads. An exception's reference count is in
/// libstdc++'s shared library, which is not instrumented. So the sanitizer cannot see that the last owner
/// frees the exception after all others have released it, and reports its destruction as a race.
extern "C" const char* __tsan_default_suppressions();
extern "C" const char* __tsan_default_suppressions() {
  return "race:std::__exception_ptr::exception_ptr::_M_release\n";
}
