{{/* Checks that the schema cannot express. Included by the gateway's Deployment, which is always rendered. */}}
{{- define "draftwire.checks" -}}
{{- with .Values -}}
{{- if not (or .tls.enabled .tls.allowPlaintext) -}}
{{- fail "tls.enabled: prompts and texts would travel unencrypted, which the services refuse; set it, or tls.allowPlaintext where the network encrypts on its own" -}}
{{- end -}}
{{- if and .tls.enabled .tls.allowPlaintext -}}
{{- fail "tls.allowPlaintext: has no use with tls.enabled" -}}
{{- end -}}
{{- if and .tls.certManager.enabled (not (and .tls.enabled .tls.certManager.issuer.name)) -}}
{{- fail "tls.certManager: needs tls.enabled and issuer.name" -}}
{{- end -}}
{{- if and .tls.requireClientCert (not .tls.enabled) -}}
{{- fail "tls.requireClientCert: needs tls.enabled" -}}
{{- end -}}
{{- if mod .verifier.tensorParallel.size .verifier.tensorParallel.nodes -}}
{{- fail "verifier.tensorParallel: size has to be a multiple of nodes: each node has as many ranks" -}}
{{- end -}}
{{- if and (gt (int .verifier.tensorParallel.nodes) 1) (ge (float64 .verifier.drainSeconds) 30.0) -}}
{{- fail "verifier.drainSeconds: has to be below 30 where torchrun starts the ranks, which kills them after 30 s" -}}
{{- end -}}
{{- if and .drafter.autoscaling.enabled (not .drafter.enabled) -}}
{{- fail "drafter.autoscaling: needs drafter.enabled" -}}
{{- end -}}
{{- if and (not .monitoring.enabled) (or .monitoring.rules.enabled .monitoring.serviceMonitor.enabled) -}}
{{- fail "monitoring.rules, monitoring.serviceMonitor: need monitoring.enabled" -}}
{{- end -}}
{{- if and .drafter.autoscaling.enabled (not .drafter.autoscaling.prometheusAddress) -}}
{{- fail "drafter.autoscaling.prometheusAddress: where is the Prometheus that scrapes the verifiers?" -}}
{{- end -}}
{{- if and .tracing.endpoint .networkPolicy.enabled (not .networkPolicy.traces.to) -}}
{{- fail "tracing.endpoint: networkPolicy.traces.to lets nobody through to it" -}}
{{- end -}}
{{- if and .tracing.endpoint .networkPolicy.enabled (not (has (regexFind "[0-9]+$" .tracing.endpoint) (toStrings .networkPolicy.traces.ports))) -}}
{{- fail "tracing.endpoint: its port is not among networkPolicy.traces.ports" -}}
{{- end -}}
{{- if and (not .tracing.endpoint) (ne (float64 .tracing.sampleRatio) 1.0) -}}
{{- fail "tracing.sampleRatio: says which requests are traced, and none are; set tracing.endpoint" -}}
{{- end -}}
{{- if and .drafter.autoscaling.enabled (not .monitoring.enabled) -}}
{{- fail "drafter.autoscaling: reads metrics; set monitoring.enabled" -}}
{{- end -}}
{{- end -}}
{{- end }}
