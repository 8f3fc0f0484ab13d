{{/* Options of a service are passed as environment variables. Numbers are written as JSON, because Helm would write a large
one as 6.7e+07. */}}
{{- define "draftwire.environment" -}}
{{- $root := .root -}}
{{- $values := index $root.Values .service -}}
{{- $options := dict
  "host" "0.0.0.0"
  "port" (include "draftwire.port" .)
  "log_format" $root.Values.logFormat
  "drain_seconds" $values.drainSeconds
  "metrics_port" (include "draftwire.metricsPort" .)
-}}
{{- with $root.Values.tls -}}
{{- if .enabled -}}
{{- $_ := set $options "tls_cert" "/etc/draftwire/tls/tls.crt" -}}
{{- $_ := set $options "tls_key" "/etc/draftwire/tls/tls.key" -}}
{{- $_ := set $options "tls_ca" "/etc/draftwire/tls/ca.crt" -}}
{{- if ne $.service "verifier" -}}{{/* which calls no service */}}
{{- $_ := set $options "tls_target_name" .targetName -}}
{{- end -}}
{{- if eq $.service "gateway" -}}
{{- $_ := set $options "tls_require_client_cert" .requireClientCert -}}
{{- end -}}
{{- else -}}
{{- $_ := set $options "allow_plaintext" true -}}
{{- end -}}
{{- end -}}
{{- with $root.Values.tracing -}}
{{- if .endpoint -}}
{{- $_ := set $options "otlp_endpoint" .endpoint -}}
{{- if eq $.service "gateway" -}}{{/* which samples for all services */}}
{{- $_ := set $options "trace_sample_ratio" .sampleRatio -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if eq .service "gateway" -}}
{{- $_ := set $options "http_port" 8000 -}}
{{- with $root.Values -}}
{{- $_ := set $options "startup_timeout_s" (max .verifier.startupSeconds .drafter.startupSeconds) -}}
{{- if .tokens.secret -}}
{{- $_ := set $options "tokens_file" (printf "/etc/draftwire/tokens/%s" .tokens.key) -}}
{{- end -}}
{{- end -}}
{{- else -}}
{{- $ranks := 1 -}}
{{- if eq .service "verifier" -}}
{{- $ranks = $values.tensorParallel.size -}}
{{- $_ := set $options "tensor_parallel_size" $ranks -}}
{{- else -}}
{{- $ranks = $values.layerParallel.ranks -}}
{{- $_ := set $options "layer_parallel_ranks" $ranks -}}
{{- $_ := set $options "layer_parallel_size" $values.layerParallel.size -}}
{{- end -}}
{{- $isOne := and (le (int $ranks) 1) (ne (get ($values.options | default dict) "engine") "vllm") -}}
{{- $cuda := ternary "cuda:0" "cuda" $isOne -}}{{/* with several ranks, one GPU each; vLLM takes its own */}}
{{- $_ := set $options "device" (eq $values.device "cuda" | ternary $cuda $values.device) -}}
{{- $in := empty $root.target | ternary "" (printf "targets.%s." $root.target) -}}
{{- $missing := printf "%s%s.model: a folder under /models, or a name on the hub" $in .service -}}
{{- $_ := set $options "model" (required $missing $values.model) -}}
{{- $_ := set $options "max_added_latency_ms" $root.Values.maxAddedLatencyMs -}}
{{- end -}}
{{- range $name, $value := mergeOverwrite $options $values.options }}
- name: DRAFTWIRE_{{ upper $.service }}_{{ upper $name }}
  value: {{ kindIs "string" $value | ternary $value (toJson $value) | quote }}
{{- end }}
{{- if eq .service "gateway" }}
{{- include "draftwire.peers" $root }}
{{- else }}
# For caches of libraries: the home folder is read-only.
- name: HOME
  value: /tmp
{{- with $root.Values.models.hub }}
{{- if .enabled }}
- name: HF_HOME
  value: /hub
{{- with .tokenSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ . }}, key: {{ $root.Values.models.hub.tokenKey }}}}
{{- end }}
{{- else }}
- name: HF_HUB_OFFLINE
  value: "1"
{{- end }}
{{- end }}
{{- end }}
{{- with $values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Addresses of verifiers and drafters. Their Services are headless, so a name resolves to all ready pods. */}}
{{- define "draftwire.peers" -}}
{{- $verifier := include "draftwire.name" (dict "root" . "service" "verifier") -}}
{{- $drafter := include "draftwire.name" (dict "root" . "service" "drafter") -}}
{{- if eq .Values.discovery "kubernetes" }}
- name: DRAFTWIRE_GATEWAY_DISCOVERY
  value: kubernetes
- name: DRAFTWIRE_GATEWAY_VERIFIER_SERVICE
  value: {{ $verifier }}
{{- if .Values.drafter.enabled }}
- name: DRAFTWIRE_GATEWAY_DRAFTER_SERVICE
  value: {{ $drafter }}
{{- end }}
{{- else }}
- name: DRAFTWIRE_GATEWAY_VERIFIER
  value: dns:///{{ $verifier }}:50052
- name: DRAFTWIRE_GATEWAY_DRAFTER
  value: {{ .Values.drafter.enabled | ternary (printf "dns:///%s:50053" $drafter) "none" }}
{{- end }}
{{- end }}
