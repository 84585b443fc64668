// What MSVC lacks of what the sources say, included before each of them (CMakeLists.txt, cmake/Instances.cmake): so
// that src/ says nothing of it. Never ran.
#pragma once

#define __attribute__(ignored)  // inlining of lambdas, which nvcc's device compiler decides by itself then

#ifndef __CUDACC__
#include <__msvc_int128.hpp>  // of MSVC's own library, since Visual Studio 2022 17.1
#define __int128 std::_Signed128
#endif
