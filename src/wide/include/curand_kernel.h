// Stands in for cuRAND's header, which CUTLASS's example 41 includes for its dropout. Wide rows have none, and the
// example's dropout is only compiled within torch.
#pragma once
